// The plan of MLA decode attention (mla_plan.cuh), from the lengths as they lie on the device: one block, once a step.
//
// With parts of at most `c` units of 64 rows a request of `u` units has ceil(u / c) of them. For every number of waves
// w that the grid has room for, a warp finds the smallest c whose parts fill no more than w waves; of these the one
// that should end first is taken, by the bound for blocks that are handed out as SMs become free. Longer
// parts come first, so that short ones fill what is left at the end.
#include "common/csrc/decode.cuh"
#include "mla_plan.cuh"

namespace mla {

constexpr int kPlanThreads = 256, kPlanWarps = kPlanThreads / 32, kMostWaves = kPlanWarps;
// What merging costs, in units.
constexpr float kMergeCost = 1.f;

struct PlanArguments {
  const int* lengths;    // [batch]
  PlannedMerge* merges;  // [batch], then the items
  int batch, capacity, slots, sm_count;
  float overhead;  // of a block, in units
};

__device__ __forceinline__ int parts_for(int units, int most) { return (units + most - 1) / most; }

__global__ void __launch_bounds__(kPlanThreads) make_plan(const PlanArguments a) {
  __shared__ int units[kMostRequests], parts[kMostRequests];
  __shared__ float estimate[kMostWaves];
  __shared__ int choice[kMostWaves];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  decode::pdl_launch();
  decode::pdl_wait();
  for (int r = thread; r < a.batch; r += kPlanThreads) {
    const int length = __ldcg(a.lengths + r);
    units[r] = units_of(length < a.capacity ? length : a.capacity);
  }
  __syncthreads();

  // Every warp for itself: the longest context, all of them together, and the choice for `warp` + 1 waves.
  float longest = 0, total = 0;
  for (int r = lane; r < a.batch; r += 32) {
    longest = fmaxf(longest, float(units[r]));
    total += float(units[r]);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    longest = fmaxf(longest, __shfl_xor_sync(decode::kAll, longest, mask));
    total += __shfl_xor_sync(decode::kAll, total, mask);
  }
  const int room = (warp + 1) * a.sm_count;
  auto count = [&](int most) {
    float sum = 0;
    for (int r = lane; r < a.batch; r += 32) sum += float(parts_for(units[r], most));
    return decode::sum_lanes(sum);
  };
  int low = parts_for(int(longest), kMostParts), high = int(longest);
  if (low < 1) low = 1;
  if (high < low) high = low;
  const bool fits = room <= a.slots && count(high) <= float(room);
  while (fits && low < high) {
    const int middle = (low + high) / 2;
    if (count(middle) <= float(room)) high = middle;
    else low = middle + 1;
  }
  const float items = count(high), each = float(a.sm_count), block = float(high) + a.overhead;
  const float in_waves = float(warp + 1) * block, handed_out = (total + a.overhead * items) / each + block;
  if (lane == 0) {
    choice[warp] = high;
    estimate[warp] = fits ? fminf(in_waves, handed_out) + (float(high) < longest ? kMergeCost : 0.f) : INFINITY;
  }
  __syncthreads();
  // Where the grid has no room for any, as many as there are requests: it has room for those.
  int best = -1;
  for (int w = 0; w < kMostWaves; ++w)
    if (estimate[w] < INFINITY && (best < 0 || estimate[w] < estimate[best])) best = w;
  const int most = best < 0 ? (longest > 1.f ? int(longest) : 1) : choice[best];
  for (int r = thread; r < a.batch; r += kPlanThreads) parts[r] = parts_for(units[r], most);
  __syncthreads();

  PlannedItem* items_out = reinterpret_cast<PlannedItem*>(a.merges + a.batch);
  int all = 0, merges[3] = {};
  for (int r = 0; r < a.batch; ++r) {
    all += parts[r];
    if (parts[r] != 1) ++merges[merge_class(parts[r])];
  }
  const int counts = merges[0] | merges[1] << kCountBits | merges[2] << 2 * kCountBits;
  for (int r = thread; r < a.batch; r += kPlanThreads) {
    const int mine = parts[r], size = mine ? parts_for(units[r], mine) : 0;
    const int mine_in = merge_class(mine);
    int first = 0, place = 0;
    for (int other = 0; other < a.batch; ++other) {
      const int theirs = parts[other], their_size = theirs ? parts_for(units[other], theirs) : 0;
      if (their_size > size || (their_size == size && other < r)) first += theirs;
      const int in = merge_class(theirs);
      if (theirs != 1 && (in < mine_in || (in == mine_in && other < r))) ++place;
    }
    const int length = __ldcg(a.lengths + r);
    if (mine != 1) a.merges[place] = {r, first, mine, counts};
    for (int part = 0; part < mine; ++part)
      items_out[first + part] = {r, part, mine, length < a.capacity ? length : a.capacity};
  }
  for (int i = all + thread; i < a.slots; i += kPlanThreads) items_out[i] = {-1, 0, 0, 0};
  for (int i = merges[0] + merges[1] + merges[2] + thread; i < a.batch; i += kPlanThreads)
    a.merges[i] = {-1, 0, 0, counts};
}

}  // namespace mla

// `plan` is int32 [batch + slots, 4]; slots at least batch. Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_mla_plan(const int* lengths, void* plan, int batch, int capacity, int slots, int sm_count,
                             float overhead, void* stream) {
  if (batch < 1 || batch > mla::kMostRequests || slots < batch) return host::kNoInstance;
  const mla::PlanArguments a{lengths, static_cast<mla::PlannedMerge*>(plan), batch, capacity, slots, sm_count,
                             overhead};
  return decode::launch(mla::make_plan, dim3(1), mla::kPlanThreads, 0, a, stream);
}
