// What both makers of a plan share, and the plan of batch-invariant mode: how a context is cut depends on its own
// length alone, so that neither its parts nor their sums change with the batch. Items then lie side by side in a line
// of time, which is divided evenly among the blocks: who takes an item does not matter to it.
#pragma once
#include "common/csrc/decode.cuh"
#include "mla_plan.cuh"

namespace mla {

constexpr int kPlanThreads = 1024, kPlanWarps = kPlanThreads / 32;

// Sum over the threads before this one, and over all. Called by all threads; two calls need a barrier in between.
__device__ __forceinline__ int scan(int value, int* warp_sums, int* all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(decode::kAll, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < kPlanWarps; ++w) {
    const int other = warp_sums[w];
    if (w < warp) before += other;
    total += other;
  }
  *all = total;
  return before + sum - value;
}

// The last of `sorted[0, count)` that is at most `value`; the first one always is.
__device__ __forceinline__ int last_at_most(const int* sorted, int count, int value) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}
// Merges: contexts that are not one item, in three classes. Of thread r the context r; all threads call.
__device__ __forceinline__ void write_merges(PlannedMerge* merges, int batch, int some_parts, int first, int parts,
                                             int* warp_sums) {
  const int thread = threadIdx.x;
  int counts;
  const bool merged = thread < batch && parts != 1;
  const int kind = merge_class(parts, some_parts),
            place = scan(merged ? 1 << kind * kCountBits : 0, warp_sums, &counts);
  if (thread >= batch) return;
  *reinterpret_cast<PlannedRequest*>(requests_of(merges, batch) + thread) = {first, parts, {0, 0}};
  int to = merges_of(place, kind);
  for (int other = 0; other < kind; ++other) to += merges_of(counts, other);
  if (merged) merges[to] = {thread, first, parts, counts};
  const int all = merges_of(counts, 0) + merges_of(counts, 1) + merges_of(counts, 2);
  if (thread >= all) merges[thread] = {-1, 0, 0, counts};
}

struct ByLengthArguments {
  const int* lengths;    // [batch]
  PlannedMerge* merges;  // the plan
  int batch, capacity, blocks, some_parts;
  // Up to `whole` units a context has a part for each `few_each` of them, beyond `first_parts` and one for each
  // `more_each` of the rest.
  int few_each, whole, first_parts, more_each;
  int item;  // what an item costs beside its units, each of which costs 4
};

__host__ __device__ constexpr int parts_by_length(int units, int few_each, int whole, int first_parts, int more_each) {
  const int parts = units <= whole ? (units + few_each - 1) / few_each : first_parts + (units - whole) / more_each;
  return parts < kMostParts ? parts : kMostParts;
}

struct ByLengthMemory {
  int units[kMostRequests], length[kMostRequests];
  int first[kMostRequests + 1], cost[kMostRequests + 1];  // items and their cost before each context
  int warp_sums[3][kPlanWarps];
};

// Which block takes item `i`: by where it begins in the line of all. Fewer items than blocks go to the first ones: the
// others hold SMs until the launch ahead has ended, and a block behind them would begin only then.
struct Line {
  const ByLengthMemory& m;
  int batch, blocks, item;
  __device__ int block_of(int i, PlannedItem* made) const {
    const int at = last_at_most(m.first, batch, i), part = i - m.first[at], parts = m.first[at + 1] - m.first[at];
    const int begin = begin_of(m.units[at], part, parts);
    if (made != nullptr) *made = {at, begin, begin_of(m.units[at], part + 1, parts), m.length[at]};
    if (m.first[batch] <= blocks) return i;
    return int(int64_t(m.cost[at] + 4 * begin + item * part) * blocks / m.cost[batch]);
  }
};

__global__ void __launch_bounds__(kPlanThreads) plan_by_length(const ByLengthArguments a) {
  __shared__ ByLengthMemory m;
  const int thread = threadIdx.x;
  decode::pdl_wait();  // and no earlier start of what follows: see make_plan
  int length = 0, items, cost;
  if (thread < a.batch) {
    length = __ldcg(a.lengths + thread);
    if (length > a.capacity) length = a.capacity;
  }
  const int units = units_of(length);
  const int parts = units > 0 ? parts_by_length(units, a.few_each, a.whole, a.first_parts, a.more_each) : 0;
  const int first = scan(parts, m.warp_sums[0], &items);
  const int before = scan(4 * units + a.item * parts, m.warp_sums[1], &cost);
  if (thread < a.batch)
    m.units[thread] = units, m.length[thread] = length, m.first[thread] = first, m.cost[thread] = before;
  if (thread == 0) m.first[a.batch] = items, m.cost[a.batch] = cost;
  __syncthreads();

  int* const firsts = reinterpret_cast<int*>(first_items_of(a.merges, a.batch));
  PlannedItem* const line = reinterpret_cast<PlannedItem*>(items_of(a.merges, a.batch, a.blocks));
  const Line blocks = {m, a.batch, a.blocks, a.item};
  for (int i = thread; i < items; i += kPlanThreads) {
    const int block = blocks.block_of(i, line + i), last = i > 0 ? blocks.block_of(i - 1, nullptr) : -1;
    for (int b = last + 1; b <= block; ++b) firsts[b] = i;
    if (i == items - 1)
      for (int b = block + 1; b <= a.blocks; ++b) firsts[b] = items;
  }
  if (items == 0 && thread <= a.blocks) firsts[thread] = 0;
  write_merges(a.merges, a.batch, a.some_parts, first, parts, m.warp_sums[2]);
  __threadfence();
}

}  // namespace mla
