// Joins the parts of a context, weighed by their sums of exponentials, in a fixed order.
#pragma once
#include "mla_decode.cuh"

namespace mla {

constexpr int kJoinThreads = 128;

// One block: 512 / CHUNKS columns of one head of one request; CHUNKS groups of threads take every CHUNKS-th part.
template <int CHUNKS>
__global__ void __launch_bounds__(kJoinThreads) join(const Arguments a) {
  constexpr int kLanes = kJoinThreads / CHUNKS;
  __shared__ float weights[kJoinThreads], tops[4];
  __shared__ float4 others[CHUNKS][kLanes];
  const int thread = threadIdx.x, group = thread / kLanes, lane = thread % kLanes;
  const int64_t row = blockIdx.x;
  const int column = (blockIdx.y * kLanes + lane) * 4;
  moe::pdl_wait();
  moe::pdl_launch();
  const float log = thread < a.splits ? a.sums[row * a.splits + thread] : -INFINITY;
  float top = log;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
  if (thread % 32 == 0) tops[thread / 32] = top;
  __syncthreads();
  top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  // A context of length zero: every part is empty and the result is zero.
  weights[thread] = top == -INFINITY ? 0.f : exp2f(log - top);
  __syncthreads();
  float4 sum = make_float4(0, 0, 0, 0);
  float total = 0;
  const float* part = a.parts + row * a.splits * kLatent + column;
#pragma unroll 8
  for (int split = group; split < a.splits; split += CHUNKS) {
    // Parts that were not written are read, so that no load waits for another, and then dropped.
    const float4 value = __ldcg(reinterpret_cast<const float4*>(part + int64_t(split) * kLatent));
    const float weight = weights[split];
    if (weight > 0) {
      sum.x += value.x * weight, sum.y += value.y * weight, sum.z += value.z * weight, sum.w += value.w * weight;
    }
  }
  for (int split = 0; split < a.splits; ++split) total += weights[split];
  if (CHUNKS > 1) {
    others[group][lane] = sum;
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int one = 1; one < CHUNKS; ++one) {
      const float4 other = others[one][lane];
      sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
  }
  const float inverse = total > 0 ? 1.f / total : 0.f;
  *reinterpret_cast<uint2*>(a.out + row * kLatent + column) = make_uint2(
      moe::pack_bf16(sum.x * inverse, sum.y * inverse), moe::pack_bf16(sum.z * inverse, sum.w * inverse));
}

}  // namespace mla
