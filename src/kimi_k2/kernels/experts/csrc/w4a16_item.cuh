// What the multiplying warpgroups do with a work item.
#pragma once
#include "w4a16_multiply.cuh"

namespace w4a16 {

// Publish this split of a first-stage sum; true for the block that came last, which then holds the whole sum, added in
// the order of the splits.
template <int NT, class C>
__device__ __forceinline__ bool sum_splits(const Args& a, Smem<C>& s, int cell, int split, int n,
                                           float (&acc)[C::TILES][NT / 2]) {
  const int tid = threadIdx.x - 128, q = tid & 3;
  float4* base = reinterpret_cast<float4*>(a.partial) + (size_t)cell * s.splits1 * (C::NMAX * 64) + tid;
#pragma unroll
  for (int m = 0; m < C::TILES; ++m)
#pragma unroll
    for (int j = 0; j < NT / 8; ++j)
      if (8 * j + 2 * q < n)
        __stcg(base + (size_t)split * (C::NMAX * 64) + (m * (NT / 8) + j) * C::CONSUMERS,
               make_float4(acc[m][4 * j], acc[m][4 * j + 1], acc[m][4 * j + 2], acc[m][4 * j + 3]));
  named_sync(1, C::CONSUMERS);
  if (tid == 0) {  // the barrier hands the block's stores to this thread; its fence publishes them all
    fence_gpu();
    s.last = atomicInc(a.count1 + cell, s.splits1 - 1) == unsigned(s.splits1 - 1);
    fence_gpu();
  }
  named_sync(1, C::CONSUMERS);
  if (!s.last) return false;
#pragma unroll
  for (int m = 0; m < C::TILES; ++m)
#pragma unroll
    for (int i = 0; i < NT / 2; ++i) acc[m][i] = 0.f;
#pragma unroll 4
  for (int c = 0; c < s.splits1; ++c)
#pragma unroll
    for (int m = 0; m < C::TILES; ++m)
#pragma unroll
      for (int j = 0; j < NT / 8; ++j)
        if (8 * j + 2 * q < n) {
          const float4 u = __ldcg(base + (size_t)c * (C::NMAX * 64) + (m * (NT / 8) + j) * C::CONSUMERS);
          acc[m][4 * j] += u.x;
          acc[m][4 * j + 1] += u.y;
          acc[m][4 * j + 2] += u.z;
          acc[m][4 * j + 3] += u.w;
        }
  return true;
}

// Sums times the scales of all, which gate and up have each their own.
template <int NT, class C>
__device__ __forceinline__ void scale_by_all(const Args& a, const Item& it, int expert,
                                             float (&acc)[C::TILES][NT / 2]) {
  const float* all = it.stage ? a.all2 + (size_t)expert * a.hidden : a.all13 + (size_t)expert * 2 * a.inter;
  const float first = factor_of(all, a.divides), second = it.stage ? first : factor_of(all + a.inter, a.divides);
#pragma unroll
  for (int m = 0; m < C::TILES; ++m)
#pragma unroll
    for (int i = 0; i < NT / 2; ++i) acc[m][i] *= i & 2 ? second : first;
}

template <int NT, class C>
__device__ __forceinline__ void process_item(const Args& a, Smem<C>& s, const Item& it, int4 tile, int& seq,
                                             int& events) {
  const int tid = threadIdx.x - 128, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int first = (warp >> 2) * C::TILES, w = warp & 3;  // 64-row tile, and 16-row part of it
  const int n = tile.z;
  float acc[C::TILES][NT / 2];
#pragma unroll
  for (int m = 0; m < C::TILES; ++m)
#pragma unroll
    for (int i = 0; i < NT / 2; ++i) acc[m][i] = 0.f;

  if (C::INNER && it.stage == 0) {
    const int chunks = it.kb1 - it.kb0;
#pragma unroll 1
    for (int part = 0; part < a.inner; ++part) {
      float some[C::TILES][NT / 2];
#pragma unroll
      for (int m = 0; m < C::TILES; ++m)
#pragma unroll
        for (int i = 0; i < NT / 2; ++i) some[m][i] = 0.f;
      const int before = part * chunks / a.inner, after = (part + 1) * chunks / a.inner;
      multiply<NT, false, C>(s, is_paired<C>(tile), after - before, seq, some);
#pragma unroll
      for (int m = 0; m < C::TILES; ++m)
#pragma unroll
        for (int i = 0; i < NT / 2; ++i) acc[m][i] += some[m][i];
    }
  } else if (C::W2_BF16 && it.stage == 1) {
    multiply<NT, true, C>(s, is_paired<C>(tile), it.kb1 - it.kb0, seq, acc);
  } else {
    multiply<NT, false, C>(s, is_paired<C>(tile), it.kb1 - it.kb0, seq, acc);
  }

  const int cell = it.tile * (a.inter / 128) + it.group;
  if constexpr (C::FEW)  // with more tokens there is work enough without splits
    if (it.stage == 0 && s.splits1 > 1 && !sum_splits<NT, C>(a, s, cell, it.split, n, acc)) return;
  if constexpr (C::Format::WHOLE) scale_by_all<NT, C>(a, it, tile.x, acc);
  if (it.stage == 0) {
    if constexpr (C::E4M3) {
      store_records<NT, C>(a, s, it, tile, acc);
    } else {
#pragma unroll
      for (int m = 0; m < C::TILES; ++m) {
        __nv_bfloat16* column =
            static_cast<__nv_bfloat16*>(a.inter_q) + it.group * 128 + (first + m) * 32 + w * 8 + 2 * q;
#pragma unroll
        for (int j = 0; j < NT / 8; ++j) {
          const uint32_t u = activate(acc[m] + 4 * j, kUp);
          if (8 * j + g < n) __stcg(reinterpret_cast<uint32_t*>(column + (size_t)(tile.y + 8 * j + g) * a.inter), u);
        }
      }
    }
    if constexpr (C::ROWS) fence_proxy_global();  // the copy engine reads it
    named_sync(1, C::CONSUMERS);
    if (tid == 0) st_release(a.flags + cell, s.epoch);
  } else if constexpr (C::FUSED) {
    const int event = events % kRing;
    if (events >= kRing) mbar_wait(&s.epi_empty[event], ((events / kRing) - 1) & 1);
#pragma unroll
    for (int j = 0; j < NT / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int col = 8 * j + 2 * q + i;
        if (col < n) {
          const float weight = weighed_in_sum(a) ? 1.f : s.route.weight[tile.y + col];
          float* dst = static_cast<float*>(a.contrib) +
                       ((size_t)s.route.slot_pair[tile.y + col] * a.splits2 + it.split) * a.hidden + it.group * 256;
#pragma unroll
          for (int m = 0; m < C::TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float part = acc[m][4 * j + 2 * h + i] * weight;
              __stcg(dst + (first + m) * 64 + w * 16 + 4 * (g >> 1) + 2 * h + (g & 1),
                     a.unpaired ? __bfloat162float(__float2bfloat16(part)) : part);
            }
        }
      }
    if (tid == 0) {
      s.epi_tile[event] = it.tile;
      s.epi_slab[event] = it.group;
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.epi_full[event]);
    ++events;
  } else {
    // As the registers hold them: of a slot's 256 values those of a lane, of two 64-row tiles, are neighbours. Nobody
    // but the sums reads them, and those know the order and the pairs' weights. A token's only pair is weighed here:
    // its part would be rounded once more than by a kernel all in bf16, and no other part would make up for that.
    const int half = C::TILES == 1 ? first / 2 * 128 + first % 2 * 2 : (warp >> 2) * 128;
    __nv_bfloat16* dst = static_cast<__nv_bfloat16*>(a.contrib) +
                         (((size_t)it.group * a.tokens * a.top_k + tile.y) * a.splits2 + it.split) * 256 + half +
                         w * 32 + g * 4;
#pragma unroll
    for (int j = 0; j < NT / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int col = 8 * j + 2 * q + i;
        __nv_bfloat16* at = dst + (size_t)col * a.splits2 * 256;
        if (col >= n) continue;
        const float weight =
            a.top_k == 1 ? moe::load_written(a.topk_weights + moe::load_written(a.sorted_pair + tile.y + col)) : 1.f;
        uint32_t rows[C::TILES];
#pragma unroll
        for (int m = 0; m < C::TILES; ++m)
          rows[m] = pack_bf16(acc[m][4 * j + i] * weight, acc[m][4 * j + 2 + i] * weight);
        if constexpr (C::TILES == 2) __stcg(reinterpret_cast<uint2*>(at), make_uint2(rows[0], rows[1]));
        else __stcg(reinterpret_cast<uint32_t*>(at), rows[0]);
      }
  }
}

}  // namespace w4a16
