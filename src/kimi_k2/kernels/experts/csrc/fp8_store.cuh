// What two warpgroups do with the sums of a work item: the quantized intermediate, or the pairs' outputs.
// A lane has rows `row` and `row` + 8 of each 128-row half: acc[half][4 * j + 2 * (+8) + i] is of token 8 j + 2 q + i.
#pragma once
#include "fp8_slab.cuh"

namespace moe {

// First stage: silu(gate) * up of one 128-value group, in e4m3 with a scale a token.
template <int NT, int NMAX, int STAGES, bool FUSED>
__device__ __forceinline__ void store_intermediate(const Fp8Args& a, Fp8Smem<NMAX, STAGES, FUSED>& s, const Item it,
                                                   const int4 tile, float (&acc)[2][NT / 2]) {
  constexpr int R = NT / 2;
  const int tid = threadIdx.x - 128, wg = tid >> 7, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int row = wg * 64 + (warp & 3) * 16 + g, n = tile.z, groups = a.inter / 128;
  const int cell = it.tile * groups + it.group;
  if (a.splits1 > 1) {
    // Publish this split; the last of them sums all, in order, and goes on.
    float4* base = reinterpret_cast<float4*>(a.partial) + (size_t)cell * a.splits1 * (NMAX / 2) * 256 + tid;
    float4* mine = base + (size_t)it.split * (NMAX / 2) * 256;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < NT / 8; ++j)
        if (8 * j + 2 * q < n)
          __stcg(mine + (m * (NT / 8) + j) * 256,
                 make_float4(acc[m][4 * j], acc[m][4 * j + 1], acc[m][4 * j + 2], acc[m][4 * j + 3]));
    named_sync(1, 256);
    if (tid == 0)  // the barrier hands the block's stores to this thread, which publishes them all
      s.last = inc_acq_rel(a.count1 + cell, a.splits1 - 1) == unsigned(a.splits1 - 1);
    named_sync(1, 256);
    if (!s.last) return;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < R; ++i) acc[m][i] = 0.f;
#pragma unroll 4
    for (int c = 0; c < a.splits1; ++c)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < NT / 8; ++j)
          if (8 * j + 2 * q < n) {
            const float4 u = __ldcg(base + ((size_t)c * (NMAX / 2) + m * (NT / 8) + j) * 256);
            acc[m][4 * j] += u.x;
            acc[m][4 * j + 1] += u.y;
            acc[m][4 * j + 2] += u.z;
            acc[m][4 * j + 3] += u.w;
          }
  }
  // silu(gate) * up, the largest magnitude of each token's 128 values, then e4m3.
#pragma unroll
  for (int i = 0; i < R; ++i) acc[0][i] = __fdividef(acc[0][i], 1.f + __expf(-acc[0][i])) * acc[1][i];
#pragma unroll
  for (int j = 0; j < NT / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = fmaxf(fabsf(acc[0][4 * j + i]), fabsf(acc[0][4 * j + 2 + i]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 4));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 8));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 16));
      if (g == 0) s.red[warp][8 * j + 2 * q + i] = m;
    }
  named_sync(1, 256);
  if (tid < n) {
    float m = s.red[0][tid];
#pragma unroll
    for (int w = 1; w < 8; ++w) m = fmaxf(m, s.red[w][tid]);
    const float scale = group_scale(m);
    s.col_scale[tid] = 1.f / scale;
    __stcg(a.inter_s + (size_t)(tile.y + tid) * groups + it.group, scale);
  }
  named_sync(1, 256);
  constexpr int kPitch = Fp8Smem<NMAX, STAGES, FUSED>::kStagePitch;
#pragma unroll
  for (int j = 0; j < NT / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = 8 * j + 2 * q + i;
      if (col < n) {
        const float inv = s.col_scale[col];
        const uint32_t v = pack_e4m3(acc[0][4 * j + i] * inv, acc[0][4 * j + 2 + i] * inv, 0.f, 0.f);
        s.stage_out[col * kPitch + row] = v & 0xff;
        s.stage_out[col * kPitch + row + 8] = (v >> 8) & 0xff;
      }
    }
  named_sync(1, 256);
  for (int c = tid; c < n * 8; c += 256) {
    const int col = c >> 3, part = c & 7;
    __stcg(reinterpret_cast<uint4*>(static_cast<unsigned char*>(a.inter_q) + (size_t)(tile.y + col) * a.inter +
                                    it.group * 128 + part * 16),
           *reinterpret_cast<const uint4*>(s.stage_out + col * kPitch + part * 16));
  }
  named_sync(1, 256);
  if (tid == 0) st_release(a.flags + cell, s.epoch);
}

// Second stage: a slab of the outputs, weighted for the fused mode's sums and where no sum follows.
template <int NT, int NMAX, int STAGES, bool FUSED>
__device__ __forceinline__ void store_outputs(const Fp8Args& a, Fp8Smem<NMAX, STAGES, FUSED>& s, const Item it,
                                              const int4 tile, float (&acc)[2][NT / 2], int& events) {
  const int tid = threadIdx.x - 128, wg = tid >> 7, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int row = wg * 64 + (warp & 3) * 16 + g, n = tile.z;
  const bool direct = a.top_k * a.splits2 == 1;
  if constexpr (FUSED) {
    const int slot = events % kRing;
    if (!direct && events >= kRing) mbar_wait(&s.epi_empty[slot], ((events / kRing) - 1) & 1);
#pragma unroll
    for (int j = 0; j < NT / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int col = 8 * j + 2 * q + i;
        if (col < n) {
          const int pair = s.route.slot_pair[tile.y + col];
          const float w = s.route.weight[tile.y + col];
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int r = it.group * 256 + m * 128 + row + 8 * h;
              const float v = acc[m][4 * j + 2 * h + i] * w;
              if (direct) static_cast<__nv_bfloat16*>(a.out)[(size_t)pair * a.hidden + r] = __float2bfloat16(v);
              else __stcg(static_cast<float*>(a.contrib) + ((size_t)pair * a.splits2 + it.split) * a.hidden + r, v);
            }
        }
      }
    if (!direct) {
      if (tid == 0) {
        s.epi_tile[slot] = it.tile;
        s.epi_slab[slot] = it.group;
      }
      mbar_arrive(&s.epi_full[slot]);
      ++events;
    }
  } else if (!direct) {
    // Each warpgroup's 128 values of a token as its registers hold them, four rows of a lane side by side; the copy
    // engine stores the tile's tokens as one piece. Nobody but the sums reads them, and those know the order. The
    // 32-byte units of a slot are permuted so that no two lanes write one bank.
    unsigned char* mine = s.stage_out + wg * (NMAX * 256);
    const bool leader = (tid & 127) == 0;
    if (leader) {                               // the copy of the slab before
      if (NMAX == kSlabwiseTokens && events) {  // it ended an item, slabwise
        bulk_wait();
        announce_slabs(a, events);
        events = 0;
      } else {
        bulk_wait_read();
      }
    }
    named_sync(2 + wg, 128);
    unsigned char* put[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      put[i] = mine + (2 * q + i) * 256 + output_unit((warp & 3) * 2 + (g >> 2), tile.y + 2 * q + i) * 32 + (g & 3) * 8;
#pragma unroll
    for (int j = 0; j < NT / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint2*>(put[i] + j * 2048) = make_uint2(pack_bf16(acc[0][4 * j + i], acc[0][4 * j + 2 + i]),
                                                                  pack_bf16(acc[1][4 * j + i], acc[1][4 * j + 2 + i]));
    fence_proxy_async();
    named_sync(2 + wg, 128);
    if (leader) {
      const size_t slot = (size_t)((it.group * a.splits2 + it.split) * 2 + wg) * a.tokens * a.top_k + tile.y;
      bulk_store(static_cast<__nv_bfloat16*>(a.contrib) + slot * 128, smem_u32(mine), n * 256);
      bulk_commit();
    }
  } else {
    // Transpose through shared memory so that each token's 64 rows leave as one 128-byte line.
    constexpr int kCols = NT <= NMAX / 2 ? NT : NT / 2;
    constexpr int kPitch = Fp8Smem<NMAX, STAGES, FUSED>::kStagePitch;
    unsigned char* mine = s.stage_out + wg * (NMAX / 2) * kPitch;
    const uint32_t put =
        smem_u32(mine) + ((lane >> 4) * 8 + (lane & 7)) * kPitch + (warp & 3) * 32 + ((lane >> 3) & 1) * 16;
    named_sync(1, 256);  // the item's pairs and weights are in place
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int c0 = 0; c0 < NT; c0 += kCols) {
#pragma unroll
        for (int j = c0 / 8; j < (c0 + kCols) / 8; j += 2) {
          const float2 u = *reinterpret_cast<const float2*>(s.meta_w + 8 * j + 2 * q);
          const float2 v = *reinterpret_cast<const float2*>(s.meta_w + 8 * j + 8 + 2 * q);
          stmatrix_x4_trans(put + (j - c0 / 8) * 8 * kPitch, pack_bf16(acc[m][4 * j] * u.x, acc[m][4 * j + 1] * u.y),
                            pack_bf16(acc[m][4 * j + 2] * u.x, acc[m][4 * j + 3] * u.y),
                            pack_bf16(acc[m][4 * j + 4] * v.x, acc[m][4 * j + 5] * v.y),
                            pack_bf16(acc[m][4 * j + 6] * v.x, acc[m][4 * j + 7] * v.y));
        }
        named_sync(2 + wg, 128);
        for (int c = tid & 127; c < min(kCols, n - c0) * 8; c += 128) {
          const int col = c >> 3, part = c & 7;
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)s.meta_pair[c0 + col] * a.hidden +
                                    it.group * 256 + m * 128 + wg * 64 + part * 8) =
              *reinterpret_cast<const uint4*>(mine + col * kPitch + part * 16);
        }
        named_sync(2 + wg, 128);
      }
    named_sync(1, 256);  // before the next item overwrites the pairs
  }
}

}  // namespace moe
