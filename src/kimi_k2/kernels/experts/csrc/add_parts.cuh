// Sums of a token's parts of a slab, by a warp: eight bf16 values a lane.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

namespace moe {

// sum += a part times its weight.
__device__ __forceinline__ void add_part(float (&sum)[8], uint4 part, float weight) {
  const uint32_t v[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v[k]));
    sum[2 * k] += u.x * weight;
    sum[2 * k + 1] += u.y * weight;
  }
}

// sum += eight parts, the i-th times lane i's `weight`; a part whose lane has no row is zero.
__device__ __forceinline__ void add_parts(float (&sum)[8], const uint4 (&parts)[8], int row, float weight) {
#pragma unroll
  for (int i = 0; i < 8; ++i) add_part(sum, parts[i], __shfl_sync(0xffffffffu, row >= 0 ? weight : 0.f, i));
}

}  // namespace moe
