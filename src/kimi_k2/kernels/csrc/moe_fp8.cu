// Blockwise FP8 experts on Hopper: one persistent launch streams every chosen expert's weights once.
//
// Work is a queue of items in order: first-stage items (256 rows: 128 gate and the same 128 up rows, a range of
// hidden blocks), then second-stage items (256 rows of the hidden dimension, a range of intermediate blocks).
// Blocks claim items with one atomic, so whatever an item waits for was claimed before it: no deadlock, whatever is
// resident. In a block, one thread feeds the weight ring through the copy engine without ever waiting for
// activations, three warps fill the token operand, two warpgroups multiply (weights are the 64-row operand, tokens
// the narrow one), and in the fused mode four more warps sum finished tokens.
// Every sum has a fixed order; which block performs it does not matter.
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

template <int NMAX, int STAGES, bool FUSED>
__global__ void __launch_bounds__(FUSED ? 512 : 384, 1)
    moe_fp8_kernel(const __grid_constant__ CUtensorMap map13, const __grid_constant__ CUtensorMap map2,
                   const __grid_constant__ Fp8Args a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  using S = Fp8Smem<NMAX, STAGES, FUSED>;
  S& s = *reinterpret_cast<S*>(raw);  // swizzled tiles need the base aligned to 1024 bytes: checked below
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int groups = a.inter / 128, slabs = a.hidden / 256;

  if (tid == 0) {
    if (smem_u32(raw) & 1023) __trap();
    prefetch_tensormap(&map13);
    prefetch_tensormap(&map2);
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(&s.weights_full[i], 1);
      mbar_init(&s.full[i], FUSED ? 1 : 3);
      mbar_init(&s.empty[i], 8);
    }
    for (int i = 0; i < kRing; ++i) {
      mbar_init(&s.item_full[i], 1);
      mbar_init(&s.item_empty[i], 11);
      mbar_init(&s.epi_full[i], 256);
      mbar_init(&s.epi_empty[i], 1);
    }
    fence_mbar_init();
  }
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (tid == 0) s.epoch = *reinterpret_cast<volatile int*>(a.ctrl + 2) + 1;
  if constexpr (FUSED) {
    // The tokens go to the L2 before the weights' requests queue up in front of them.
    const size_t line = (size_t)blockIdx.x * 512 + tid;
    if (line < (size_t)a.tokens * a.hidden / 64) prefetch_l2(static_cast<const char*>(a.x) + line * 128);
    align_fused(a, s.route, s.w[0], NMAX);
    fence_proxy_async();  // the scratch becomes a landing zone of the copy engine
  }
  __syncthreads();
  int tiles;
  if constexpr (FUSED) tiles = s.route.num_tiles;
  else tiles = *a.num_tiles;
  const int total = tiles * (groups * a.splits1 + slabs / a.item_slabs * a.splits2);

  if (warp < 4) {
    if constexpr (!FUSED && NMAX >= 64) reg_dealloc<56>();
    if (warp == 0) {
      if (lane == 0) {
        int item = blockIdx.x, seq = 0;
        for (int round = 0;; ++round) {
          const int slot = round % kRing;
          if (round >= kRing) mbar_wait(&s.item_empty[slot], ((round / kRing) - 1) & 1);
          s.ring[slot] = item < total ? item : -1;
          mbar_arrive(&s.item_full[slot]);
          if (item >= total) break;
          const int next = gridDim.x + atomicAdd(a.ctrl, 1);
          const Item it = decode_item(a, item, tiles);
          const int expert = load_tile<FUSED>(a, s, it.tile).x;
          const CUtensorMap* map = it.stage == 0 ? &map13 : &map2;
          const int row0 = it.stage == 0 ? expert * 2 * a.inter + it.group * 128 : expert * a.hidden + it.group * 256;
          const int gap = it.stage == 0 ? a.inter : 128, nk = it.kb1 - it.kb0;
          // The ring is deeper than what the fused mode keeps in flight: flags, atomics and token loads would wait
          // behind a full ring of requests.
          constexpr int kInFlight = FUSED ? 2 : STAGES;
          for (int i = 0; i < it.slabs * nk; ++i, ++seq) {
            const int row = row0 + i / nk * 256, kb = it.kb0 + i % nk;
            const int st = seq % STAGES;
            if (seq >= STAGES) mbar_wait(&s.empty[st], ((seq / STAGES) - 1) & 1);
            if (seq >= kInFlight) {
              const int before = seq - kInFlight;
              mbar_wait(&s.weights_full[before % STAGES], (before / STAGES) & 1);
            }
            mbar_arrive_expect_tx(&s.weights_full[st], 2 * kTileBytes);
            const uint32_t dst = smem_u32(s.w[st]);
            tma_load_2d(dst, map, &s.weights_full[st], kb * 128, row, FUSED ? kEvictFirst : kEvictNormal);
            tma_load_2d(dst + kTileBytes, map, &s.weights_full[st], kb * 128, row + gap, FUSED ? kEvictFirst : kEvictNormal);
          }
          item = next;
        }
        // The last block to run out of work opens the next launch.
        if (atomicInc(reinterpret_cast<unsigned*>(a.ctrl) + 1, gridDim.x - 1) == gridDim.x - 1) {
          a.ctrl[0] = 0;
          a.ctrl[2] = s.epoch;
        }
      }
    } else {
      const int me = warp - 1;
      int seq = 0, pending = 0;  // prepared mode: stages whose copies are in flight and not yet announced
      auto announce = [&](int k) {
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbar_arrive(&s.full[k % STAGES]);
      };
      for (int round = 0;; ++round) {
        const int slot = round % kRing;
        mbar_wait(&s.item_full[slot], (round / kRing) & 1);
        const int item = s.ring[slot];
        __syncwarp();
        if (lane == 0) mbar_arrive(&s.item_empty[slot]);
        if (item < 0) break;
        const Item it = decode_item(a, item, tiles);
        const int4 tile = load_tile<FUSED>(a, s, it.tile);
        const int n = tile.z;
        if (it.stage == 1) {
          bool ready = true;
          for (int f = lane; f < groups; f += 32) ready &= ld_acquire(a.flags + it.tile * groups + f) == s.epoch;
          if (!__all_sync(0xffffffffu, ready)) {
            if constexpr (!FUSED) {
              cp_async_wait<0>();
              for (; pending; --pending) announce(seq - pending);
            }
            do {
              ready = true;
              for (int f = lane; f < groups; f += 32) ready &= ld_acquire(a.flags + it.tile * groups + f) == s.epoch;
            } while (!__all_sync(0xffffffffu, ready));
          }
        }
        const int nk = it.kb1 - it.kb0;
        if constexpr (FUSED) {
          for (int step = 0; step < it.slabs * nk; ++step, ++seq) {
            if (seq % 3 != me) continue;
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
                    v[i] = __ldg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(a.x) +
                                                                (size_t)(s.route.slot_pair[sl] / a.top_k) * a.hidden +
                                                                kb * 128) + lane);
                  else
                    v[i].x = __ldcg(reinterpret_cast<const unsigned*>(static_cast<const unsigned char*>(a.inter_q) +
                                                                      (size_t)sl * a.inter + kb * 128) + lane);
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
            announce(seq);
          }
        } else {
          // Three warps share each stage; rows are gathered by index in the first stage, contiguous in the second.
          const int t = tid - 32;
          const unsigned char* src = static_cast<const unsigned char*>(it.stage == 0 ? a.xq : a.inter_q);
          const float* ssrc = it.stage == 0 ? a.xs : a.inter_s;
          const int width = it.stage == 0 ? a.hidden : a.inter;
          constexpr int kRows = (NMAX * 8 + 95) / 96;
          int rows[kRows];
          int srow[(NMAX + 95) / 96];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const int c = (t + 96 * i) >> 3;
            rows[i] = c < n ? (it.stage == 0 ? __ldg(a.sorted_pair + tile.y + c) / a.top_k : tile.y + c) : -1;
          }
#pragma unroll
          for (int i = 0; i < (NMAX + 95) / 96; ++i) {
            const int c = t + 96 * i;
            srow[i] = c < n ? (it.stage == 0 ? __ldg(a.sorted_pair + tile.y + c) / a.top_k : tile.y + c) : -1;
          }
          for (int step = 0; step < it.slabs * nk; ++step, ++seq) {
            const int st = seq % STAGES, kb = it.kb0 + step % nk;
            if (seq >= STAGES) mbar_wait(&s.empty[st], ((seq / STAGES) - 1) & 1);
            const uint32_t b = smem_u32(s.b[st]);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              const int idx = t + 96 * i, c = idx >> 3, part = idx & 7;
              if (rows[i] >= 0)
                cp_async_16(b + c * 128 + ((part ^ (c & 7)) << 4), src + (size_t)rows[i] * width + kb * 128 + part * 16);
            }
#pragma unroll
            for (int i = 0; i < (NMAX + 95) / 96; ++i)
              if (srow[i] >= 0)
                cp_async_4(smem_u32(&s.sb[st][t + 96 * i]), ssrc + (size_t)srow[i] * (width / 128) + kb);
            cp_async_commit();
            if (pending == 2) {
              cp_async_wait<2>();
              announce(seq - 2);
            } else {
              ++pending;
            }
          }
        }
      }
      if constexpr (!FUSED) {
        cp_async_wait<0>();
        for (; pending; --pending) announce(seq - pending);
      }
    }
  } else if (warp < 12) {
    if constexpr (!FUSED && NMAX >= 64) reg_alloc<224>();
    int seq = 0, events = 0;
    for (int round = 0;; ++round) {
      const int slot = round % kRing;
      mbar_wait(&s.item_full[slot], (round / kRing) & 1);
      const int item = s.ring[slot];
      __syncwarp();
      if (lane == 0) mbar_arrive(&s.item_empty[slot]);
      if (item < 0) break;
      Item it = decode_item(a, item, tiles);
      const int4 tile = load_tile<FUSED>(a, s, it.tile);
      for (int slab = 0; slab < it.slabs; ++slab, ++it.group) {
        constexpr int kHalf = NMAX / 2;
        if (tile.z <= kHalf) process_item<kHalf>(a, s, it, tile, seq, events);
        else if (NMAX == 128 && tile.z <= 96) process_item<(NMAX == 128 ? 96 : NMAX)>(a, s, it, tile, seq, events);
        else process_item<NMAX>(a, s, it, tile, seq, events);
      }
    }
    if (FUSED && a.top_k * a.splits2 > 1) {
      for (int i = 0; i < kRing; ++i, ++events) {  // one goodbye to each summing warp
        const int slot = events % kRing;
        if (events >= kRing) mbar_wait(&s.epi_empty[slot], ((events / kRing) - 1) & 1);
        if (tid == 128) s.epi_tile[slot] = -1;
        mbar_arrive(&s.epi_full[slot]);
      }
    }
  } else if constexpr (FUSED) {
    // Summing warps: one per slot of the event ring. A token's slab is summed by whoever completes its last part.
    const int slot = warp - 12;
    for (int t = blockIdx.x; t < a.tokens; t += gridDim.x)
      if (s.route.token_pairs[t] == 0)
        for (int i = tid - 384; i < a.hidden / 2; i += 128)
          reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden)[i] = 0;
    if (a.top_k * a.splits2 == 1) return;
    for (int round = 0;; ++round) {
      mbar_wait(&s.epi_full[slot], round & 1);
      const int tile_id = s.epi_tile[slot], slab = s.epi_slab[slot];
      __syncwarp();
      if (lane == 0) mbar_arrive(&s.epi_empty[slot]);
      if (tile_id < 0) break;
      fence_gpu();
      bool last = false;
      int token = 0;
      if (lane < s.route.tile_n[tile_id]) {
        token = s.route.slot_pair[s.route.tile_start[tile_id] + lane] / a.top_k;
        const unsigned want = s.route.token_pairs[token] * a.splits2 - 1;
        last = atomicInc(a.count2 + token * slabs + slab, want) == want;
      }
      unsigned todo = __ballot_sync(0xffffffffu, last);
      if (todo) fence_gpu();
      while (todo) {
        const int t = __shfl_sync(0xffffffffu, token, __ffs(todo) - 1);
        todo &= todo - 1;
        const float* p = static_cast<const float*>(a.contrib) + (size_t)t * a.top_k * a.splits2 * a.hidden + slab * 256;
        float4 u = make_float4(0.f, 0.f, 0.f, 0.f), v = u;
        const int parts = a.top_k * a.splits2;
#pragma unroll 8
        for (int c = 0; c < parts; ++c)
          if (s.route.pair_valid[t * a.top_k + c / a.splits2]) {
            const float4 x = __ldcg(reinterpret_cast<const float4*>(p + (size_t)c * a.hidden) + lane);
            const float4 y = __ldcg(reinterpret_cast<const float4*>(p + (size_t)c * a.hidden) + 32 + lane);
            u.x += x.x; u.y += x.y; u.z += x.z; u.w += x.w;
            v.x += y.x; v.y += y.y; v.z += y.z; v.w += y.w;
          }
        uint2* o = reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + slab * 256);
        o[lane] = make_uint2(pack_bf16(u.x, u.y), pack_bf16(u.z, u.w));
        o[32 + lane] = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
      }
    }
  }
}

// Prepared mode, first launch: block 0 sorts the pairs by expert, the others quantize the tokens.
__global__ void __launch_bounds__(1024, 1) prepare_kernel(const __grid_constant__ Fp8Args a) {
  __shared__ int count[kMaxExperts];
  __shared__ int warp_sum[32];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (blockIdx.x == 0) {
    const int pairs = a.tokens * a.top_k;
    if (tid < kMaxExperts) count[tid] = 0;
    __syncthreads();
#pragma unroll 4
    for (int p = tid; p < pairs; p += 1024) {
      const int e = local_expert(a, p);
      if (e >= 0) atomicAdd(&count[e], 1);
    }
    __syncthreads();
    const int n = tid < kMaxExperts ? count[tid] : 0;
    const int tiles = (n + a.nmax - 1) / a.nmax;
    int slots = n, cells = tiles;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      int& v = pass ? cells : slots;
      for (int d = 1; d < 32; d <<= 1) {
        const int u = __shfl_up_sync(0xffffffffu, v, d);
        if (lane >= d) v += u;
      }
      if (lane == 31) warp_sum[warp] = v;
      __syncthreads();
      int base = 0;
      for (int w = 0; w < warp; ++w) base += warp_sum[w];
      v += base;
      __syncthreads();
    }
    const int start = slots - n;
    if (tid == 1023) *a.num_tiles = cells;
    if (tid < kMaxExperts) count[tid] = start;
    const int even = tiles ? min(a.nmax, ((n + tiles - 1) / tiles + 7) / 8 * 8) : 0;
    for (int i = 0, off = 0; i < tiles; ++i, off += even)
      a.tiles[cells - tiles + i] = make_int4(tid, start + off, max(0, min(even, n - off)), 0);
    __syncthreads();
#pragma unroll 4
    for (int p = tid; p < pairs; p += 1024) {
      const int e = local_expert(a, p);
      if (e >= 0) a.sorted_pair[atomicAdd(&count[e], 1)] = p;
    }
  } else {
    // 16 threads a group of 128 values, 8 values a thread.
    const size_t total = (size_t)a.tokens * (a.hidden / 128) * 16;
    for (size_t i = (size_t)(blockIdx.x - 1) * 1024 + tid; i < total; i += (size_t)(gridDim.x - 1) * 1024) {
      const uint4 raw = __ldg(static_cast<const uint4*>(a.x) + i);
      float f[8];
      const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
      float m = 0.f;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&w[k]));
        f[2 * k] = u.x;
        f[2 * k + 1] = u.y;
        m = fmaxf(m, fmaxf(fabsf(u.x), fabsf(u.y)));
      }
#pragma unroll
      for (int d = 8; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d, 16));
      const float scale = group_scale(m), inv = 1.f / scale;
      static_cast<uint2*>(a.xq)[i] =
          make_uint2(pack_e4m3(f[0] * inv, f[1] * inv, f[2] * inv, f[3] * inv),
                     pack_e4m3(f[4] * inv, f[5] * inv, f[6] * inv, f[7] * inv));
      if ((i & 15) == 0) a.xs[i >> 4] = scale;
    }
    if (a.top_k * a.splits2 == 1)  // no summing launch: tokens without a valid pair are cleared here
      for (int t = blockIdx.x - 1; t < a.tokens; t += gridDim.x - 1)
        if (local_expert(a, t) < 0)
          for (int i = tid; i < a.hidden / 2; i += 1024)
            reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden)[i] = 0;
  }
}

// Prepared mode, last launch: out[t] = sum of the token's weighted parts, in order.
__global__ void __launch_bounds__(128) combine_kernel(const __grid_constant__ Fp8Args a) {
  const int t = blockIdx.x, col = (blockIdx.y * 128 + threadIdx.x) * 8;
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (col >= a.hidden) return;
  float acc[8] = {};
#pragma unroll 8
  for (int j = 0; j < a.top_k; ++j) {
    if (local_expert(a, t * a.top_k + j) < 0) continue;
    for (int c = 0; c < a.splits2; ++c) {
      const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(
          static_cast<const __nv_bfloat16*>(a.contrib) + ((size_t)(t * a.top_k + j) * a.splits2 + c) * a.hidden + col));
      const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&w[k]));
        acc[2 * k] += u.x;
        acc[2 * k + 1] += u.y;
      }
    }
  }
  *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + col) =
      make_uint4(pack_bf16(acc[0], acc[1]), pack_bf16(acc[2], acc[3]), pack_bf16(acc[4], acc[5]),
                 pack_bf16(acc[6], acc[7]));
}

}  // namespace moe
