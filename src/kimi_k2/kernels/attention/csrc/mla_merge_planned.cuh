// Merges the parts of every context that a plan cut, in their order: as many as the plan says of each request.
#pragma once
#include "mla_merge.cuh"

namespace mla {

// Parts of a group of threads in flight together.
constexpr int kMergedTogether = 8;

// Where a thread's columns of a request's parts lie, the first part's number given; `*_step` from one part to the next.
template <bool HALVES>
struct PlannedSource {
  static constexpr int kValues = Source<HALVES>::kValues;
  int64_t row, part, sum;  // of the result; in 16 bytes; in pairs of HALVES, else single values
  int column, part_step, sum_step;
  __device__ PlannedSource(const Arguments& a, int request, int within, int first) {
    part_step = a.heads * (kLatent / kValues);
    part = int64_t(first) * part_step + within;
    int head;
    if constexpr (HALVES) {
      const Slot slot(within, a.heads);
      head = slot.head, column = slot.column, sum_step = a.heads * 2;
      sum = int64_t(first) * sum_step + slot.half * a.heads + head;
    } else {
      head = within / (kLatent / kValues), column = within % (kLatent / kValues) * kValues, sum_step = a.heads;
      sum = int64_t(first) * sum_step + head;
    }
    row = int64_t(request) * a.heads + head;
  }
  // Base-2 logarithm of a part's sum of exponentials, and the power of two that its values lack.
  __device__ float2 sum_of(const Arguments& a, int split) const {
    const int64_t at = sum + int64_t(split) * sum_step;
    if constexpr (HALVES) return __ldcg(reinterpret_cast<const float2*>(a.sums) + at);
    else return make_float2(__ldcg(a.sums + at), 1.f);
  }
  __device__ uint4 part_of(const Arguments& a, int split) const {
    return __ldcg(static_cast<const uint4*>(a.parts) + part + int64_t(split) * part_step);
  }
};

// CHUNKS groups of threads take every CHUNKS-th part; then the first group adds up. A block belongs to one request.
template <bool HALVES, int CHUNKS>
__global__ void __launch_bounds__(kJoinThreads) merge_planned(const Arguments a) {
  constexpr int kLanes = kJoinThreads / CHUNKS, kValues = Source<HALVES>::kValues;
  static_assert(kFewHeads * kLatent / 4 % kJoinThreads == 0, "a block belongs to one request");
  __shared__ float others[CHUNKS > 1 ? CHUNKS - 1 : 1][kValues + 2][kLanes];
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int thread = blockIdx.x * kLanes + lane, threads = a.heads * (kLatent / kValues), request = thread / threads;
  pdl_wait();
  pdl_launch();
  const int2 planned = __ldcg(reinterpret_cast<const int2*>(a.plan + request));
  const int parts = planned.y;
  if (parts == 1) return;  // that part's block wrote the result
  const PlannedSource<HALVES> source(a, request, thread % threads, planned.x);
  float top = -INFINITY, total = 0, sum[kValues] = {};
  for (int base = group; base < parts; base += CHUNKS * kMergedTogether) {
    float2 log[kMergedTogether];
    uint4 part[kMergedTogether];
    float best = top;
#pragma unroll
    for (int i = 0; i < kMergedTogether; ++i) {
      const int split = base + i * CHUNKS;
      log[i] = make_float2(-INFINITY, 0.f);
      if (split < parts) log[i] = source.sum_of(a, split), part[i] = source.part_of(a, split);
    }
#pragma unroll
    for (int i = 0; i < kMergedTogether; ++i) best = fmaxf(best, log[i].x);
    const float own = top == -INFINITY ? 0.f : exp2_approximate(top - best);
    top = best, total *= own;
#pragma unroll
    for (int j = 0; j < kValues; ++j) sum[j] *= own;
#pragma unroll
    for (int i = 0; i < kMergedTogether; ++i) {
      if (log[i].x == -INFINITY) continue;
      const float share = exp2_approximate(log[i].x - top), weight = share * log[i].y;
      float values[kValues];
      Source<HALVES>::unpack(values, part[i]);
      total += share;
#pragma unroll
      for (int j = 0; j < kValues; ++j) sum[j] += values[j] * weight;
    }
  }
  if (CHUNKS > 1) {
    if (group > 0) {
#pragma unroll
      for (int j = 0; j < kValues; ++j) others[group - 1][j][lane] = sum[j];
      others[group - 1][kValues][lane] = top, others[group - 1][kValues + 1][lane] = total;
    }
    __syncthreads();
    if (group > 0) return;
    float best = top;
#pragma unroll
    for (int one = 0; one < CHUNKS - 1; ++one) best = fmaxf(best, others[one][kValues][lane]);
    const float own = top == -INFINITY ? 0.f : exp2_approximate(top - best);
    total *= own;
#pragma unroll
    for (int j = 0; j < kValues; ++j) sum[j] *= own;
#pragma unroll
    for (int one = 0; one < CHUNKS - 1; ++one) {
      const float theirs = others[one][kValues][lane];
      const float share = theirs == -INFINITY ? 0.f : exp2_approximate(theirs - best);
      total += share * others[one][kValues + 1][lane];
#pragma unroll
      for (int j = 0; j < kValues; ++j) sum[j] += share * others[one][j][lane];
    }
  }
  // A context of length zero has no parts and the result is zero.
  const float inverse = total > 0 ? 1.f / total : 0.f;
#pragma unroll
  for (int j = 0; j < kValues; ++j) sum[j] *= inverse;
  Source<HALVES>::write(a.out + source.row * kLatent + source.column, sum);
}

}  // namespace mla
