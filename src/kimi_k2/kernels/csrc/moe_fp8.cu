// Blockwise FP8 experts on Hopper: one persistent launch streams every chosen expert's weights once.
//
// Work is a queue of items in order: first-stage items (256 rows: 128 gate and the same 128 up rows, a range of
// hidden blocks), then second-stage items (256 rows of the hidden dimension, a range of intermediate blocks).
// Blocks claim items with one atomic, so whatever an item waits for was claimed before it: no deadlock, whatever is
// resident. In a block, one thread feeds the weight ring through the copy engine without ever waiting for
// activations, three warps fill the token operand, two warpgroups multiply (weights are the 64-row operand, tokens
// the narrow one), and in the fused mode four more warps sum finished tokens.
// Every sum has a fixed order; which block performs it does not matter.
#include "moe_fp8_item.cuh"

namespace moe {

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

}  // namespace moe
