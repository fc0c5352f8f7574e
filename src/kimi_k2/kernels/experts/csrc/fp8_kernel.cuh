// Blockwise FP8 experts on Hopper: one persistent launch streams every chosen expert's weights once.
//
// Work is a queue of items in order: first-stage items (256 rows: 128 gate and the same 128 up rows, a range of
// hidden blocks), then second-stage items (256 rows of the hidden dimension, a range of intermediate blocks). Blocks
// claim items in order with one atomic, so whatever an item waits for has been claimed by a block that runs: no
// deadlock, however few of the blocks, one an SM, another stream's launches leave room for. In a block, one thread
// feeds the weight ring through the copy engine without ever waiting for activations, three warps fill the token
// operand, two warpgroups multiply (weights are the 64-row operand, tokens the narrow one), and four more warps may
// sum: finished tokens in the fused mode, finished slabs in the prepared mode where the L2 would not hold them all.
// There a launch before this one sorts and quantizes, and else one after it sums. Every sum has a fixed order; which
// block performs it does not matter.
#include "fp8_fill.cuh"
#include "fp8_multiply.cuh"
#include "fp8_sum.cuh"

namespace moe {

// One thread: claim items, announce them to the block, request their weights.
template <int NMAX, int STAGES, bool FUSED>
__device__ __forceinline__ void feed_weights(const Fp8Args& a, Fp8Smem<NMAX, STAGES, FUSED>& s,
                                             const CUtensorMap& map13, const CUtensorMap& map2, int tiles, int total,
                                             int item) {
  const bool slabwise = !FUSED && NMAX == kSlabwiseTokens && sums_slabwise(a);
  int seq = 0;
  // Prepared mode claims an item, and looks up its tile, one item before it is needed.
  [[maybe_unused]] int claimed = 0;
  [[maybe_unused]] Item ahead;
  [[maybe_unused]] int4 ahead_tile;
  if constexpr (!FUSED) {
    claimed = atomicAdd(a.ctrl, 1);
    if (item < total) {
      ahead = decode_item(a, item, tiles, slabwise);
      ahead_tile = load_tile<FUSED>(a, s, ahead.tile);
    }
  }
  for (int round = 0;; ++round) {
    const int slot = round % kRing;
    if (round >= kRing) mbar_wait(&s.item_empty[slot], ((round / kRing) - 1) & 1);
    s.ring[slot] = item < total ? item : -1;
    Item it;
    int expert, next;
    if constexpr (FUSED) {
      mbar_arrive(&s.item_full[slot]);
      if (item >= total) break;
      next = atomicAdd(a.ctrl, 1);
      it = decode_item(a, item, tiles);
      expert = load_tile<FUSED>(a, s, it.tile).x;
    } else {
      s.ring_item[slot] = it = ahead;
      s.ring_tile[slot] = ahead_tile;
      expert = ahead_tile.x;
      mbar_arrive(&s.item_full[slot]);
      next = claimed;
      // Both, so that the claim under way has ended: it must not come after the count's return to zero.
      if (item >= total && next >= total) break;
      claimed = atomicAdd(a.ctrl, 1);
      if (next < total) {
        ahead = decode_item(a, next, tiles, slabwise);
        ahead_tile = load_tile<FUSED>(a, s, ahead.tile);
      }
    }
    const CUtensorMap* map = it.stage == 0 ? &map13 : &map2;
    const int row0 = it.stage == 0 ? expert * 2 * a.inter + it.group * 128 : expert * a.hidden + it.group * 256;
    const int gap = it.stage == 0 ? a.inter : 128, nk = it.kb1 - it.kb0;
    for (int i = 0; i < it.slabs * nk; ++i, ++seq) {
      const int row = row0 + i / nk * 256, kb = it.kb0 + i % nk;
      const int st = seq % STAGES;
      if (seq >= STAGES) mbar_wait(&s.empty[st], ((seq / STAGES) - 1) & 1);
      // The ring is deeper than what the fused mode keeps in flight: flags, atomics and token loads would wait
      // behind a full ring of requests.
      constexpr int kInFlight = 2;
      if (FUSED && seq >= kInFlight) {
        const int before = seq - kInFlight;
        mbar_wait(&s.weights_full[before % STAGES], (before / STAGES) & 1);
      }
      uint64_t* bar = FUSED ? &s.weights_full[st] : &s.full[st];
      mbar_arrive_expect_tx(bar, 2 * kTileBytes);
      const uint32_t dst = smem_u32(s.w[st]);
      tma_load_2d(dst, map, bar, kb * 128, row, kEvictFirst);
      tma_load_2d(dst + kTileBytes, map, bar, kb * 128, row + gap, kEvictFirst);
    }
    item = next;
  }
  // The last block to run out of work opens the next launch.
  if (atomicInc(reinterpret_cast<unsigned*>(a.ctrl) + 1, gridDim.x - 1) == gridDim.x - 1) {
    a.ctrl[0] = 0;
    a.ctrl[2] = s.epoch;
  }
}

template <int NMAX, int STAGES, bool FUSED>
__global__ void __launch_bounds__(main_threads(FUSED, NMAX), 1)
    moe_fp8_kernel(const __grid_constant__ CUtensorMap map13, const __grid_constant__ CUtensorMap map2,
                   const __grid_constant__ Fp8Args a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  using S = Fp8Smem<NMAX, STAGES, FUSED>;
  S& s = *reinterpret_cast<S*>(raw);  // swizzled tiles need the base aligned to 1024 bytes: checked below
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int groups = a.inter / 128;
  const bool slabwise = !FUSED && NMAX == kSlabwiseTokens && sums_slabwise(a);

  if (tid == 0) {
    if (smem_u32(raw) & 1023) __trap();
    prefetch_tensormap(&map13);
    prefetch_tensormap(&map2);
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(&s.weights_full[i], 1);
      mbar_init(&s.full[i], FUSED ? 1 : 1 + kFillThreads);  // prepared: the weights, and each thread's copies
      mbar_init(&s.empty[i], kMultiplyWarps);
    }
    for (int i = 0; i < kRing; ++i) {
      mbar_init(&s.item_full[i], 1);
      mbar_init(&s.item_empty[i], kFillWarps + kMultiplyWarps);
      mbar_init(&s.epi_full[i], kMultiplyThreads);
      mbar_init(&s.epi_empty[i], kSumWarps);
    }
    fence_mbar_init();
  }
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  int first = 0;
  if (tid == 0) {
    first = atomicAdd(a.ctrl, 1);  // on its way while the block sorts
    s.epoch = *reinterpret_cast<volatile int*>(a.ctrl + 2) + 1;
  }
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
  const int total = tiles * (groups * a.splits1 + slab_items(a, slabwise) * a.splits2);

  if (warp < kFirstMultiplyWarp) {
    if constexpr (!FUSED && NMAX >= 64) reg_dealloc<56>();
    if (warp == 0) {
      if (lane == 0) feed_weights(a, s, map13, map2, tiles, total, first);
    } else {
      if constexpr (FUSED) fill_fused(a, s, tiles);
      else fill_prepared(a, s);
    }
  } else if (warp < kFirstSumWarp) {
    if constexpr (!FUSED && NMAX >= 64) reg_alloc<224>();
    int seq = 0, events = 0;
    for (int round = 0;; ++round) {
      const int slot = round % kRing;
      mbar_wait(&s.item_full[slot], (round / kRing) & 1);
      const int item = s.ring[slot];
      Item it;
      int4 tile;
      if constexpr (!FUSED) it = s.ring_item[slot], tile = s.ring_tile[slot];
      __syncwarp();
      if (lane == 0) mbar_arrive(&s.item_empty[slot]);
      if (item < 0) break;
      if constexpr (FUSED) it = decode_item(a, item, tiles), tile = load_tile<FUSED>(a, s, it.tile);
      for (int slab = 0; slab < it.slabs; ++slab, ++it.group) {
        constexpr int kHalf = NMAX / 2;
        if (tile.z <= kHalf) process_item<kHalf>(a, s, it, tile, seq, events);
        else process_item<NMAX>(a, s, it, tile, seq, events);
      }
      if (slabwise && it.stage == 1) events = it.group;
    }
    if constexpr (!FUSED)
      if ((tid & 127) == 0) {
        bulk_wait();
        if (slabwise && events) announce_slabs(a, events);
      }
    if (FUSED && a.top_k * a.splits2 > 1) {  // a goodbye to the summing warps
      const int slot = events % kRing;
      if (events >= kRing) mbar_wait(&s.epi_empty[slot], ((events / kRing) - 1) & 1);
      if (tid == 32 * kFirstMultiplyWarp) s.epi_tile[slot] = -1;
      mbar_arrive(&s.epi_full[slot]);
    }
  } else if constexpr (FUSED) {
    for (int t = blockIdx.x; t < a.tokens; t += gridDim.x)
      if (s.route.token_pairs[t] == 0)
        for (int i = tid - 32 * kFirstSumWarp; i < a.hidden / 2; i += 32 * kSumWarps)
          reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden)[i] = 0;
    if (a.top_k * a.splits2 > 1) sum_completed(a, s, warp - kFirstSumWarp);
  } else if (slabwise) {
    sum_slabs(a, warp - kFirstSumWarp, tiles);
  }
}

}  // namespace moe
