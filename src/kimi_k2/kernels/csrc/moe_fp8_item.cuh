// Work items of the blockwise FP8 expert kernel: which weights an item covers, and what two warpgroups do with it.
#pragma once
#include "moe_fp8.cuh"

namespace moe {

// `group` is the 128-column group of the intermediate (stage 0) or the first 256-row slab (stage 1) of `slabs` slabs.
struct Item {
  int stage, tile, group, slabs, split, kb0, kb1;
};

__device__ __forceinline__ Item decode_item(const Fp8Args& a, int item, int tiles) {
  const int groups = a.inter / 128, slabs = a.hidden / 256;
  const int first = tiles * groups * a.splits1;
  Item r;
  if (item < first) {
    r.stage = 0;
    r.slabs = 1;
    r.split = item % a.splits1;
    const int t = item / a.splits1;
    r.group = t % groups;
    r.tile = t / groups;
    const int kb = a.hidden / 128;
    r.kb0 = r.split * kb / a.splits1;
    r.kb1 = (r.split + 1) * kb / a.splits1;
  } else {
    item -= first;
    r.stage = 1;
    r.slabs = a.item_slabs;
    r.split = item % a.splits2;
    const int t = item / a.splits2, per_tile = slabs / a.item_slabs;
    r.group = t % per_tile * a.item_slabs;
    r.tile = t / per_tile;
    r.kb0 = r.split * groups / a.splits2;
    r.kb1 = (r.split + 1) * groups / a.splits2;
  }
  return r;
}

template <bool FUSED, class S>
__device__ __forceinline__ int4 load_tile(const Fp8Args& a, const S& s, int tile) {
  if constexpr (FUSED) return make_int4(s.route.tile_expert[tile], s.route.tile_start[tile], s.route.tile_n[tile], 0);
  else return __ldg(a.tiles + tile);
}

__device__ __forceinline__ float group_scale(float amax) { return fmaxf(amax, 1e-10f) / 448.f; }

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint16_t lo, hi;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(d), "f"(c));
  return uint32_t(lo) | (uint32_t(hi) << 16);
}

// One 128-value group of a bf16 row by one warp: lane holds 4 values.
__device__ __forceinline__ uint32_t quantize_lane(uint2 raw, float& scale) {
  const float2 u = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&raw.x));
  const float2 v = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&raw.y));
  float m = fmaxf(fmaxf(fabsf(u.x), fabsf(u.y)), fmaxf(fabsf(v.x), fabsf(v.y)));
#pragma unroll
  for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
  scale = group_scale(m);
  const float inv = 1.f / scale;
  return pack_e4m3(u.x * inv, u.y * inv, v.x * inv, v.y * inv);
}

template <int NT, int NMAX, int STAGES, bool FUSED>
__device__ __forceinline__ void process_item(const Fp8Args& a, Fp8Smem<NMAX, STAGES, FUSED>& s, const Item it, int4 tile,
                                             int& seq, int& events) {
  constexpr int R = NT / 2;
  const int tid = threadIdx.x - 128, wg = tid >> 7, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int n = tile.z, groups = a.inter / 128;
  const int nk = it.kb1 - it.kb0;

  // Weight scales of this item: lane l keeps blocks l and 32 + l of both 128-row halves.
  float ws[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float* p = it.stage == 0
                         ? a.s13 + ((size_t)tile.x * 2 * groups + m * groups + it.group) * (a.hidden / 128) + it.kb0
                         : a.s2 + ((size_t)tile.x * (a.hidden / 128) + it.group * 2 + m) * groups + it.kb0;
    ws[m][0] = lane < nk ? __ldg(p + lane) : 0.f;
    ws[m][1] = lane + 32 < nk ? __ldg(p + lane + 32) : 0.f;
  }
  if constexpr (!FUSED) {
    if (it.stage == 1 && tid < n) {
      const int pair = __ldg(a.sorted_pair + tile.y + tid);
      s.meta_pair[tid] = pair;
      s.meta_w[tid] = __ldg(a.topk_weights + pair);
    }
  }

  float acc[2][R];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < R; ++i) acc[m][i] = 0.f;

  for (int kb = 0; kb < nk; ++kb, ++seq) {
    const int st = seq % STAGES;
    mbar_wait(&s.weights_full[st], (seq / STAGES) & 1);
    mbar_wait(&s.full[st], (seq / STAGES) & 1);
    const uint64_t da = desc_sw128(smem_u32(s.w[st]) + wg * 8192), db = desc_sw128(smem_u32(s.b[st]));
    const float w0 = __shfl_sync(0xffffffffu, kb < 32 ? ws[0][0] : ws[0][1], kb & 31);
    const float w1 = __shfl_sync(0xffffffffu, kb < 32 ? ws[1][0] : ws[1][1], kb & 31);
    const float* sb = s.sb[st];
    if constexpr (NT <= 64) {
      float t0[R], t1[R];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) Wgmma<NT>::e4m3(t0, da + 2 * k, db + 2 * k, k > 0);
#pragma unroll
      for (int k = 0; k < 4; ++k) Wgmma<NT>::e4m3(t1, da + (kTileBytes >> 4) + 2 * k, db + 2 * k, k > 0);
      wgmma_commit();
      wgmma_wait<0>();
      fence_regs(t0);
      fence_regs(t1);
#pragma unroll
      for (int j = 0; j < NT / 8; ++j) {
        const float2 c = *reinterpret_cast<const float2*>(sb + 8 * j + 2 * q);
        const float c0 = c.x * w0, c1 = c.y * w0, d0 = c.x * w1, d1 = c.y * w1;
        acc[0][4 * j] += t0[4 * j] * c0;
        acc[0][4 * j + 1] += t0[4 * j + 1] * c1;
        acc[0][4 * j + 2] += t0[4 * j + 2] * c0;
        acc[0][4 * j + 3] += t0[4 * j + 3] * c1;
        acc[1][4 * j] += t1[4 * j] * d0;
        acc[1][4 * j + 1] += t1[4 * j + 1] * d1;
        acc[1][4 * j + 2] += t1[4 * j + 2] * d0;
        acc[1][4 * j + 3] += t1[4 * j + 3] * d1;
      }
    } else {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float t[R];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) Wgmma<NT>::e4m3(t, da + m * (kTileBytes >> 4) + 2 * k, db + 2 * k, k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        fence_regs(t);
        const float w = m ? w1 : w0;
#pragma unroll
        for (int j = 0; j < NT / 8; ++j) {
          const float2 c = *reinterpret_cast<const float2*>(sb + 8 * j + 2 * q);
          const float c0 = c.x * w, c1 = c.y * w;
          acc[m][4 * j] += t[4 * j] * c0;
          acc[m][4 * j + 1] += t[4 * j + 1] * c1;
          acc[m][4 * j + 2] += t[4 * j + 2] * c0;
          acc[m][4 * j + 3] += t[4 * j + 3] * c1;
        }
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.empty[st]);
  }

  const int row = wg * 64 + (warp & 3) * 16 + g;  // and row + 8, in each 128-row half
  if (it.stage == 0) {
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
      if (tid == 0) {  // the barrier hands the block's stores to this thread; its fence publishes them all
        fence_gpu();
        s.last = atomicInc(a.count1 + cell, a.splits1 - 1) == unsigned(a.splits1 - 1);
        fence_gpu();
      }
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
    for (int i = 0; i < R; ++i) acc[0][i] = acc[0][i] / (1.f + __expf(-acc[0][i])) * acc[1][i];
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
  } else {
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
                if (direct)
                  static_cast<__nv_bfloat16*>(a.out)[(size_t)pair * a.hidden + r] = __float2bfloat16(v);
                else
                  __stcg(static_cast<float*>(a.contrib) + ((size_t)pair * a.splits2 + it.split) * a.hidden + r, v);
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
    } else {
      // Transpose through shared memory so that each token's 64 rows leave as one 128-byte line.
      constexpr int kCols = NT <= NMAX / 2 ? NT : NT / 2;
      constexpr int kPitch = Fp8Smem<NMAX, STAGES, FUSED>::kStagePitch;
      unsigned char* mine = s.stage_out + wg * (NMAX / 2) * kPitch;
      const uint32_t put = smem_u32(mine) + ((lane >> 4) * 8 + (lane & 7)) * kPitch + (warp & 3) * 32 +
                           ((lane >> 3) & 1) * 16;
      __nv_bfloat16* dst = static_cast<__nv_bfloat16*>(direct ? a.out : a.contrib);
      named_sync(1, 256);  // the item's pairs and weights are in place
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int c0 = 0; c0 < NT; c0 += kCols) {
#pragma unroll
          for (int j = c0 / 8; j < (c0 + kCols) / 8; j += 2) {
            const float2 u = *reinterpret_cast<const float2*>(s.meta_w + 8 * j + 2 * q);
            const float2 v = *reinterpret_cast<const float2*>(s.meta_w + 8 * j + 8 + 2 * q);
            stmatrix_x4_trans(put + (j - c0 / 8) * 8 * kPitch,
                              pack_bf16(acc[m][4 * j] * u.x, acc[m][4 * j + 1] * u.y),
                              pack_bf16(acc[m][4 * j + 2] * u.x, acc[m][4 * j + 3] * u.y),
                              pack_bf16(acc[m][4 * j + 4] * v.x, acc[m][4 * j + 5] * v.y),
                              pack_bf16(acc[m][4 * j + 6] * v.x, acc[m][4 * j + 7] * v.y));
          }
          named_sync(2 + wg, 128);
          for (int c = tid & 127; c < min(kCols, n - c0) * 8; c += 128) {
            const int col = c >> 3, part = c & 7;
            *reinterpret_cast<uint4*>(dst + ((size_t)s.meta_pair[c0 + col] * a.splits2 + it.split) * a.hidden +
                                      it.group * 256 + m * 128 + wg * 64 + part * 8) =
                *reinterpret_cast<const uint4*>(mine + col * kPitch + part * 16);
          }
          named_sync(2 + wg, 128);
        }
      named_sync(1, 256);  // before the next item overwrites the pairs
    }
  }
}

}  // namespace moe
