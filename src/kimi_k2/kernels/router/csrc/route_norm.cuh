// Residual sum and norm of any number of tokens as the router's launch for a few makes them (router_gemm.cuh, NORMED),
// bit for bit: one block a token, whose squares are summed as the blocks of a cluster sum theirs. The router's GEMM of
// more tokens is then over `unscaled`, and applies `inverse` to its finished sums.
#pragma once
#include "router_gemm.cuh"

namespace gate {

constexpr int kNormThreads = kSplits * kRouterWarps * 4;  // four lanes of a warp have a step of a token

constexpr int kNormGroups = 4;  // of eight values, at most, that a thread has

struct NormArgs {
  const __nv_bfloat16 *x, *delta, *norm;
  __nv_bfloat16 *total, *normed, *unscaled;  // [tokens, hidden]
  float* inverse;                            // [tokens]
  int hidden;
  float eps;
};

__global__ void __launch_bounds__(kNormThreads) route_norm_kernel(const NormArgs a) {
  __shared__ float squares[kSplits][kRouterWarps], sums[kSplits];
  cudaTriggerProgrammaticLaunchCompletion();
  const int thread = threadIdx.x, split = thread / (kRouterWarps * 4), warp = thread / 4 % kRouterWarps;
  const int columns = a.hidden / kSplits, first = (split * columns + 8 * (thread % 4)) / 8;
  const int64_t row = int64_t(blockIdx.x) * (a.hidden / 8);
  const auto at = [&](int i) { return row + first + (warp + i * kRouterWarps) * (kStep / 8); };
  const int count = (columns / kStep - warp + kRouterWarps - 1) / kRouterWarps;
  const auto take = [](const __nv_bfloat16* from, int64_t i) {
    return __ldcg(reinterpret_cast<const uint4*>(from) + i);
  };
  const auto put = [](__nv_bfloat16* to, int64_t i, const uint4 value) { reinterpret_cast<uint4*>(to)[i] = value; };
  uint4 norm[kNormGroups];
  float total[kNormGroups][8] = {};
#pragma unroll
  for (int i = 0; i < kNormGroups; ++i) {
    norm[i] = make_uint4(0, 0, 0, 0);
    if (i < count) norm[i] = decode::load_early(reinterpret_cast<const uint4*>(a.norm) + at(i) - row);
  }
  cudaGridDependencySynchronize();
  float mine = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormGroups; ++i)
    if (i < count) decode::sum8(take(a.x, at(i)), take(a.delta, at(i)), total[i]);
#pragma unroll
  for (int i = 0; i < kNormGroups; ++i) mine += decode::squares8(total[i]);
  mine = decode::sum_lanes<4>(mine);
  if (thread % 4 == 0) squares[split][warp] = mine;
  __syncthreads();
  if (thread < kSplits) {
    float of_block = 0.0f;
#pragma unroll
    for (int w = 0; w < kRouterWarps; ++w) of_block += squares[thread][w];
    sums[thread] = of_block;
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSplits; ++s) sum += sums[s];
  const float inverse = rsqrtf(sum / a.hidden + a.eps);
  if (thread == 0) a.inverse[blockIdx.x] = inverse;
#pragma unroll
  for (int i = 0; i < kNormGroups; ++i) {
    if (i >= count) break;
    put(a.total, at(i), decode::round8(total[i]));
    put(a.normed, at(i), decode::normed8(total[i], inverse, norm[i]));
    put(a.unscaled, at(i), decode::normed8(total[i], 1.0f, norm[i]));
  }
}

}  // namespace gate
