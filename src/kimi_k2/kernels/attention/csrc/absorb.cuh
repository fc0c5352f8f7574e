// W_UK absorbed into a head's query, W_UK^T q, in one order of sums for any number of tokens: a block has 64 of the 512
// columns, a warp 16 of the 128 keys, a lane two columns, whose keys it adds one after another; then the warps' sums in
// their order.
#pragma once
#include "entry.cuh"

namespace decode {

constexpr int kColumns = 64, kColumnBlocks = kRank / kColumns, kWarpKeys = kNope / kWarps;

// This thread's weights of block `rank` of a head: on their way before any query is there.
__device__ __forceinline__ void request_keys(const __nv_bfloat16* w_uk, int head, int rank,
                                             uint32_t (&keys)[kWarpKeys]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(w_uk) +
                         (int64_t(head * kNope + warp * kWarpKeys) * kRank + rank * kColumns) / 2 + lane;
#pragma unroll
  for (int k = 0; k < kWarpKeys; ++k) keys[k] = load_early(from + k * (kRank / 2));
}

// The warp's sums of a query, 128 values in shared memory, to `parts` [64] of this warp.
__device__ __forceinline__ void absorb_keys(const float* q, const uint32_t (&keys)[kWarpKeys], float* parts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float4* mine = reinterpret_cast<const float4*>(q + warp * kWarpKeys);
  float two[2] = {};
#pragma unroll
  for (int k = 0; k < kWarpKeys; k += 4) {
    const float4 given = mine[k / 4];
    const float four[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      two[0] = fmaf(four[j], low(keys[k + j]), two[0]), two[1] = fmaf(four[j], high(keys[k + j]), two[1]);
  }
  reinterpret_cast<float2*>(parts)[lane] = make_float2(two[0], two[1]);
}

// Of a column of `parts` [kWarps][64].
__device__ __forceinline__ __nv_bfloat16 absorbed(const float* parts, int column) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w * kColumns + column];
  return __float2bfloat16(sum);
}

}  // namespace decode
