// The token operand of the blockwise FP8 expert kernel: three warps fill the stages of the ring.
#pragma once
#include "fp8_item.cuh"

namespace moe {

// Fused mode: each warp takes every third step and quantizes the tokens of the first stage as it goes.
template <int NMAX, int STAGES>
__device__ __forceinline__ void fill_fused(const Fp8Args& a, Fp8Smem<NMAX, STAGES, true>& s, int tiles) {
  const int lane = threadIdx.x & 31, me = threadIdx.x / 32 - 1, groups = a.inter / 128;
  int seq = 0;
  for (int round = 0;; ++round) {
    const int slot = round % kRing;
    mbar_wait(&s.item_full[slot], (round / kRing) & 1);
    const int item = s.ring[slot];
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.item_empty[slot]);
    if (item < 0) break;
    const Item it = decode_item(a, item, tiles);
    const int4 tile = load_tile<true>(a, s, it.tile);
    const int n = tile.z, nk = it.kb1 - it.kb0;
    if (it.stage == 1) wait_for_tile(a, it.tile, s.epoch, lane);
    for (int step = 0; step < it.slabs * nk; ++step, ++seq) {
      if (seq % kFillWarps != me) continue;
      const int kb = it.kb0 + step % nk;
      const int st = seq % STAGES;
      if (seq >= STAGES) mbar_wait(&s.empty[st], ((seq / STAGES) - 1) & 1);
      unsigned char* b = s.b[st];
      for (int n0 = 0; n0 < n; n0 += 4) {
        uint2 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (n0 + i < n) {
            const int sl = tile.y + n0 + i;
            if (it.stage == 0)
              v[i] = load_written(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(a.x) +
                                                                 (size_t)(s.route.slot_pair[sl] / a.top_k) * a.hidden +
                                                                 kb * 128) +
                                  lane);
            else
              v[i].x = __ldcg(reinterpret_cast<const unsigned*>(static_cast<const unsigned char*>(a.inter_q) +
                                                                (size_t)sl * a.inter + kb * 128) +
                              lane);
          }
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (n0 + i < n) {
            uint32_t bytes = v[i].x;
            float scale;
            if (it.stage == 0) {
              bytes = quantize_lane(v[i], scale);
              if (lane == 0) s.sb[st][n0 + i] = scale;
            }
            const int c = n0 + i;
            *reinterpret_cast<uint32_t*>(b + c * 128 + (((lane >> 2) ^ (c & 7)) << 4) + (lane & 3) * 4) = bytes;
          }
      }
      if (it.stage == 1 && lane < n) s.sb[st][lane] = __ldcg(a.inter_s + (size_t)(tile.y + lane) * groups + kb);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbar_arrive(&s.full[st]);
    }
  }
}

// Prepared mode, one item: three warps share each stage; rows are gathered by index in the first stage, contiguous in
// the second. `KEPT`: they are brought once for all slabs, to place `first` of kKeptSteps and those behind it.
template <int NMAX, int STAGES, bool KEPT = false, class S>
__device__ __forceinline__ void fill_item(const Fp8Args& a, S& s, const Item& it, const int4& tile, int& seq,
                                          int first = 0) {
  const int t = threadIdx.x - 32, groups = a.inter / 128, n = tile.z;
  // Thread t copies piece `part` of every twelfth token; the swizzle of token c0 + 12 i differs from c0's by 4 (i & 1).
  const int c0 = t >> 3, part = t & 7;
  const uint32_t place = c0 * 128 + ((part ^ (c0 & 7)) << 4);
  constexpr int kRows = (NMAX + 11) / 12, kScales = (NMAX + 95) / 96;
  const unsigned char* src = static_cast<const unsigned char*>(it.stage == 0 ? a.xq : a.inter_q);
  const float* ssrc = it.stage == 0 ? a.xs : a.inter_s;
  const int blocks = (it.stage == 0 ? a.hidden : a.inter) / 128;
  // Scales of the two weight blocks of a step: thread 0 brings the one, thread 1 the other.
  const float* wsrc = it.stage == 0 ? a.s13 + ((size_t)(tile.x * 2 + t) * groups + it.group) * blocks
                                    : a.s2 + ((size_t)tile.x * (a.hidden / 128) + it.group * 2 + t) * groups;
  auto source = [&](int c) {
    return unsigned(it.stage == 0 ? load_written(a.sorted_pair + tile.y + c) / a.top_k : tile.y + c) * blocks;
  };
  // Rows of tokens c0, c0 + 12, ...: where each begins, in blocks of 128 values.
  unsigned rows[kRows], srow[kScales];
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = c0 + 12 * i < n ? source(c0 + 12 * i) : 0;
#pragma unroll
  for (int i = 0; i < kScales; ++i) srow[i] = t + 96 * i < n ? source(t + 96 * i) : 0;
  for (int slab = 0; slab < it.slabs; ++slab, wsrc += 2 * groups) {
    for (int kb = it.kb0; kb < it.kb1; ++kb, ++seq) {
      const int st = seq % STAGES;
      if (seq >= STAGES) mbar_wait(&s.empty[st], ((seq / STAGES) - 1) & 1);
      const unsigned char* from = src + kb * 128 + part * 16;
      if (!KEPT || slab == 0) {
        const int at = KEPT ? (first + kb - it.kb0) % kKeptSteps : st;
        const uint32_t b = smem_u32(s.b[at]), even = b + place, odd = b + (place ^ 64);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          if (c0 + 12 * i < n) cp_async_16((i & 1 ? odd : even) + i * 12 * 128, from + (size_t)rows[i] * 128);
#pragma unroll
        for (int i = 0; i < kScales; ++i)
          if (t + 96 * i < n) cp_async_4(smem_u32(&s.sb[at][t + 96 * i]), ssrc + (srow[i] + kb));
      }
      if (t < 2) cp_async_4(smem_u32(&s.sw[st][t]), wsrc + kb);
      cp_async_arrive(&s.full[st]);
    }
  }
}

// Prepared mode: the items that are announced, one after the other.
template <int NMAX, int STAGES>
__device__ __forceinline__ void fill_prepared(const Fp8Args& a, Fp8Smem<NMAX, STAGES, false>& s) {
  const int lane = threadIdx.x & 31;
  int seq = 0;
  for (int round = 0;; ++round) {
    const int slot = round % kRing;
    mbar_wait(&s.item_full[slot], (round / kRing) & 1);
    const int item = s.ring[slot];
    const Item it = s.ring_item[slot];
    const int4 tile = s.ring_tile[slot];
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.item_empty[slot]);
    if (item < 0) break;
    if (it.stage == 1) wait_for_tile(a, it.tile, s.epoch, lane);
    fill_item<NMAX, STAGES>(a, s, it, tile, seq);
  }
}

}  // namespace moe
