// How the rows of an e4m3 cache come to shared memory as bfloat16.
#pragma once
#include "mla_copy.cuh"

namespace mla {

// How many steps before their use the L2 is asked for rows.
constexpr int kAhead = 3;
// A step of one warp: 18 times 8 rows of 64 columns.
constexpr int kUnits = 2 * kBoxes;

// Two e4m3 values; exact: e4m3 is a part of float16, and of bfloat16.
__device__ __forceinline__ uint32_t two_bf16(uint32_t fp8) {
  const float2 two = from_e4m3(fp8);
  return pack_bf16(two.x, two.y);
}
__device__ __forceinline__ uint4 eight_bf16(uint32_t low, uint32_t high) {
  return make_uint4(two_bf16(low), two_bf16(low >> 16), two_bf16(high), two_bf16(high >> 16));
}

// GROUPS times four warps, each group every GROUPS-th 64 rows. Unit k of a warp is half of box k / 2: eight rows of 64
// columns, of which the odd ones lie 32 rows further on; a lane has sixteen of the columns and stores two chunks of the
// swizzled stage, where no two lanes that store at once meet in a bank. A step's loads are under way while its stage is
// still in use.
template <int GROUPS, class M>
__device__ __forceinline__ void convert_rows(M& m, const Arguments& a, const Part& part, int request, int page) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, row = warp * 8 + lane / 4;
  const int chunk0 = warp * kEight + lane / 4 * 128 + (lane % 4 * 2 ^ lane / 4) * 16, chunk1 = chunk0 ^ 16;
  const int group = GROUPS == 1 ? 0 : (threadIdx.x - kConsumers) / 128;
  int ahead = page_of(a, part, request, lane + kAhead);
  const int mine = __shfl_sync(~0u, page, warp);
  if (group == 0 && lane == 0 && warp < kAhead && warp < part.count) ask<true>(a, row_of(a, part, request, mine, warp));
  for (int i = group; i < part.count; i += GROUPS) {
    const int stage = i % kStages, phase = i / kStages & 1, start = i / 32 * 32;
    if (i >= 32 && i - start < GROUPS) {
      page = page_of(a, part, request, start + lane);
      ahead = page_of(a, part, request, start + lane + kAhead);
    }
    const int64_t first = row_of(a, part, request, __shfl_sync(~0u, page, i % 32), i);
    // Past the cache's end its last row is read: what lies past a sequence's end is dropped.
    const uint8_t* from[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
      from[odd] = a.cache + min(first + row + odd * 32, a.rows - 1) * kRow + lane % 4 * 16;
    uint4 units[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) units[k] = __ldcg(reinterpret_cast<const uint4*>(from[k % 2] + k / 2 * 64));
    const int then = __shfl_sync(~0u, ahead, i % 32);
    if (warp == 0 && lane == 0 && i + kAhead < part.count) ask<true>(a, row_of(a, part, request, then, i + kAhead));
    uint8_t* place = m.stage[stage];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int box = k / 2, boxes = box / 4, unit = box * kBoxBytes + k % 2 * 4 * kEight;
      if (k % 8 == 0) mbar_wait(&m.empty[stage][boxes], phase ^ 1);
      *reinterpret_cast<uint4*>(place + chunk0 + unit) = eight_bf16(units[k].x, units[k].y);
      *reinterpret_cast<uint4*>(place + chunk1 + unit) = eight_bf16(units[k].z, units[k].w);
      if (k % 8 == 7 || k == kUnits - 1) {
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbar_arrive(&m.full[stage][boxes]);
      }
    }
  }
}

}  // namespace mla
