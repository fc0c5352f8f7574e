// The plan of MLA decode attention (mla_plan.cuh), from the lengths as they lie on the device: one block, once a step.
//
// All contexts one after another are a line of units of 64 rows, which cuts divide among the blocks: a plan is known by
// its cuts. Every warp makes one candidate and estimates when its last block ends; the best one is taken. Candidates
// are of two kinds. Aligned: every context in parts of at most `c` units, a block for each, with the smallest `c` for
// which there are enough blocks. Continuous: cuts at equal distances, each moved to the end of a context that is near
// enough; far enough moved, every context stays whole and no merge is needed.
#include "mla_plan_by_length.cuh"

namespace mla {

// Aligned candidates leave room for all blocks, 3/4 or 1/2 of them; the last candidate never cuts a context. More than
// these hardly help and take longer, as the instructions of one SM limit.
constexpr int kCandidates = 16, kAligned = 3, kWhole = kCandidates - 1;

struct PlanArguments {
  const int* lengths;    // [batch]
  PlannedMerge* merges;  // the plan
  int batch, capacity, blocks;
  int some_parts;  // of a context whose merge several groups of threads share: see merge_class
  // Microseconds: of a unit for the block that takes it, and for the whole GPU's memory; of an item beside its units,
  // and for the memory; of merging, and of each part of the context with the most.
  float unit, memory, item, traffic, merge, part;
};

struct PlanMemory {
  int units[kMostRequests], begin[kMostRequests + 1];      // of each context; units before it
  int filled[kMostRequests + 1];                           // contexts before it that are not empty
  int cut[kMostBlocks + 1], cuts_before[kMostBlocks + 2];  // units before each block; cuts within contexts before it
  float estimate[kPlanWarps];
  int warp_sums[3][kPlanWarps];
  int longest;
};

__device__ __forceinline__ int parts_for(int units, int most) { return (units + most - 1) / most; }
__device__ __forceinline__ int at_least_one(int value) { return value > 1 ? value : 1; }

// The first of `sorted[0, count)` that is at least `value`; count where none is.
__device__ __forceinline__ int first_at_least(const int* sorted, int count, int value) {
  int low = -1, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (sorted[middle] >= value) high = middle;
    else low = middle;
  }
  return high;
}

// The cuts of a continuous candidate.
struct Continuous {
  const PlanMemory& m;
  int batch, blocks;  // blocks: that are used
  float line, item;   // the line's length, an item counted as so many units
  float spacing;      // line / blocks
  int near;           // cuts so many units from an end are moved to it
  // Where cut `b` lies, `at` the context that holds it.
  __device__ int operator()(int b, int* at) const {
    const int all = m.begin[batch];
    if (b >= blocks) return *at = batch, all;
    const float place = float(b) * spacing;
    int low = 0, high = batch;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (float(m.begin[middle]) + item * float(m.filled[middle]) <= place) low = middle;
      else high = middle;
    }
    const int units = m.units[low], base = m.begin[low];
    const float start = float(base) + item * float(m.filled[low]);
    int within = int(place - start - item / 2 + 0.5f);
    within = within < 0 ? 0 : within > units ? units : within;
    if (within <= near && within <= units - within) within = 0;
    else if (units - within <= near) within = units;
    *at = within == units ? low + 1 : low;
    return base + within;
  }
};

__device__ __forceinline__ float most_of_warp(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(decode::kAll, value, mask));
  return value;
}

// Parts of all contexts if none has more than `most` units; by a warp.
__device__ __forceinline__ float count_parts(const PlanMemory& m, const PlanArguments& a, int most) {
  float sum = 0;
  for (int r = threadIdx.x % 32; r < a.batch; r += 32) sum += float(parts_for(m.units[r], most));
  return decode::sum_lanes(sum);
}

// What warp `candidate` would do: by `most` if it is positive, else by the cuts.
struct Candidate {
  int most;
  Continuous cuts;
};

__device__ __forceinline__ Candidate candidate_of(const PlanMemory& m, const PlanArguments& a, int candidate,
                                                  int longest) {
  const int all = m.begin[a.batch], filled = m.filled[a.batch];
  const float item = a.item / a.unit;
  Candidate made = {0, {m, a.batch, a.blocks, float(all) + item * float(filled), item, 0, 0}};
  if (candidate < kAligned) {
    const int room = a.blocks * (4 - candidate) / 4;
    int low = at_least_one(parts_for(longest, kMostParts)), high = longest;
    if (filled > room) return made.most = -1, made;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (count_parts(m, a, middle) <= float(room)) high = middle;
      else low = middle + 1;
    }
    made.most = low;
  } else if (candidate == kWhole) {
    made.cuts.near = longest;
    const int each = (filled + a.blocks - 1) / a.blocks;
    if (each > 0) made.cuts.blocks = (filled + each - 1) / each;
  } else {
    const int number = candidate - kAligned, fewer = number / 2;
    made.cuts.blocks = at_least_one(a.blocks - fewer * (fewer + 1) / 2);  // 0, 1, 3, 6, 10, 15 fewer
    made.cuts.near = number % 2 ? at_least_one(all / made.cuts.blocks / 6) : 0;
  }
  made.cuts.spacing = made.cuts.line / float(made.cuts.blocks);
  return made;
}

// Microseconds until the last block of a candidate ends.
__device__ __forceinline__ float estimate(const PlanMemory& m, const PlanArguments& a, const Candidate& made,
                                          int longest) {
  const int all = m.begin[a.batch];
  float slowest = 0, parts = 1, number = 0;
  if (made.most < 0) return INFINITY;
  if (made.most > 0) {
    slowest = float(made.most) * a.unit + a.item;
    parts = float(parts_for(longest, made.most));
    number = count_parts(m, a, made.most);
  } else {
    // Each lane takes neighbouring blocks.
    const int each = (a.blocks + 31) / 32, begin = int(threadIdx.x % 32) * each;
    int at, cut = made.cuts(begin, &at);
    bool within = false;
    for (int b = begin; b < begin + each && b < a.blocks; ++b) {
      int next_at;
      const int next = made.cuts(b + 1, &next_at);
      if (next > cut) {
        const bool inside = next_at < a.batch && next > m.begin[next_at];
        const int items = m.filled[next_at] + inside - m.filled[at];
        within |= inside;
        slowest = fmaxf(slowest, float(next - cut) * a.unit + float(items) * a.item);
        number += float(items);
      }
      cut = next, at = next_at;
    }
    slowest = most_of_warp(slowest), number = decode::sum_lanes(number);
    const float cut_any = most_of_warp(within ? 1.f : 0.f);
    if (cut_any > 0.f) parts = float(longest) * float(made.cuts.blocks) / made.cuts.line + 2.f;
    if (parts > float(kMostParts)) return INFINITY;
  }
  // Where memory limits, or would if there were more to read, blocks that end early are still the better choice.
  return fmaxf(slowest, float(all) * a.memory + number * a.traffic) + slowest / 4 +
         (parts > 1.f ? a.merge + a.part * parts : 0.f);
}

__global__ void __launch_bounds__(kPlanThreads) make_plan(const PlanArguments a) {
  __shared__ PlanMemory m;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  // Its successor starts when this launch has ended and all that it wrote can be seen: what follows a plan reads it
  // before its own wait.
  decode::pdl_wait();
  int length = 0, all, filled;
  if (thread < a.batch) {
    length = __ldcg(a.lengths + thread);
    if (length > a.capacity) length = a.capacity;
  }
  const int mine = units_of(length);
  if (thread == 0) m.longest = 0;
  const int before = scan(mine, m.warp_sums[0], &all);
  const int filled_before = scan(mine > 0, m.warp_sums[1], &filled);
  if (thread < a.batch) m.units[thread] = mine, m.begin[thread] = before, m.filled[thread] = filled_before;
  if (thread == 0) m.begin[a.batch] = all, m.filled[a.batch] = filled;
  const float most_here = most_of_warp(float(mine));
  if (lane == 0) m.estimate[warp] = most_here;
  __syncthreads();
  float most_units = 0;
  for (int w = 0; w < kPlanWarps; ++w) most_units = fmaxf(most_units, m.estimate[w]);
  const int longest = int(most_units);
  __syncthreads();

  if (warp < kCandidates) {
    const float guess = estimate(m, a, candidate_of(m, a, warp, longest), longest);
    if (lane == 0) m.estimate[warp] = guess;
  }
  __syncthreads();
  int best = kWhole;
  for (int w = 0; w < kCandidates; ++w)
    if (m.estimate[w] < m.estimate[best]) best = w;

  // The cuts: one of them is every block's beginning, the last the end of all.
  const Candidate chosen = candidate_of(m, a, best, longest);
  if (chosen.most > 0) {
    const int parts = parts_for(mine, chosen.most);
    int number;
    const int first = scan(parts, m.warp_sums[2], &number);
    for (int part = 0; part < parts; ++part) m.cut[first + part] = before + begin_of(mine, part, parts);
    for (int b = number + thread; b <= a.blocks; b += kPlanThreads) m.cut[b] = all;
  } else if (thread <= a.blocks) {
    int at;
    m.cut[thread] = chosen.cuts(thread, &at);
  }
  __syncthreads();
  int at = 0, within = 0, number;
  if (thread <= a.blocks) {
    at = last_at_most(m.begin, a.batch, m.cut[thread]);
    within = m.cut[thread] - m.begin[at];
  }
  // An empty context holds no cut, and the last block's end is none. Of equal cuts the first counts.
  const bool cuts =
      thread < a.blocks && within > 0 && within < m.units[at] && (thread == 0 || m.cut[thread - 1] < m.cut[thread]);
  const int cuts_before = scan(cuts, m.warp_sums[0], &number);
  if (thread <= a.blocks + 1) m.cuts_before[thread] = cuts_before;
  __syncthreads();

  // Items in the line's order: every context that is not empty begins one, and every cut within one.
  PlannedItem* const items = reinterpret_cast<PlannedItem*>(items_of(a.merges, a.batch, a.blocks));
  const auto item_at = [&](int units, int context, int inside) {  // number of items that begin before
    return m.filled[context] + (inside > 0) + m.cuts_before[first_at_least(m.cut, a.blocks + 1, units)];
  };
  if (thread <= a.blocks) {
    const int first = item_at(m.cut[thread], at, within);
    int* const firsts = reinterpret_cast<int*>(first_items_of(a.merges, a.batch));
    firsts[thread] = first;
    if (cuts) {
      const int next = m.cut[first_at_least(m.cut, a.blocks + 1, m.cut[thread] + 1)] - m.begin[at];
      const int held = __ldcg(a.lengths + at);
      items[first] = {at, within, next < m.units[at] ? next : m.units[at], held < a.capacity ? held : a.capacity};
    }
  }
  int parts = 0, first = 0;
  if (mine > 0) {
    first = item_at(before, thread, 0);
    parts = item_at(before + mine, thread + 1, 0) - first;
    const int next = m.cut[first_at_least(m.cut, a.blocks + 1, before + 1)] - before;
    items[first] = {thread, 0, next < mine ? next : mine, length};
  }
  __syncthreads();
  write_merges(a.merges, a.batch, a.some_parts, first, parts, m.warp_sums[1]);
  __threadfence();
}

}  // namespace mla

// `plan` is int32 [rows, 4], with room for batch + blocks items. Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_mla_plan(const int* lengths, void* plan, int batch, int capacity, int blocks, int some_parts,
                             float unit, float memory, float item, float traffic, float merge, float part,
                             void* stream) {
  if (batch < 1 || batch > mla::kMostRequests || blocks < 1 || blocks > mla::kMostBlocks) return host::kNoInstance;
  const mla::PlanArguments a{lengths, static_cast<mla::PlannedMerge*>(plan),
                             batch,   capacity,
                             blocks,  some_parts,
                             unit,    memory,
                             item,    traffic,
                             merge,   part};
  return decode::launch(mla::make_plan, dim3(1), mla::kPlanThreads, 0, a, stream);
}

// `plan` is int32 [rows, 4], with room for all items. Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_mla_plan_by_length(const int* lengths, void* plan, int batch, int capacity, int blocks,
                                       int some_parts, int few_each, int whole, int first_parts, int more_each,
                                       int item, void* stream) {
  if (batch < 1 || batch > mla::kMostRequests || blocks < 1 || blocks > mla::kMostBlocks) return host::kNoInstance;
  const mla::ByLengthArguments a{lengths,     static_cast<mla::PlannedMerge*>(plan),
                                 batch,       capacity,
                                 blocks,      some_parts,
                                 few_each,    whole,
                                 first_parts, more_each,
                                 item};
  return decode::launch(mla::plan_by_length, dim3(1), mla::kPlanThreads, 0, a, stream);
}
