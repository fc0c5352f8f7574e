// Four-bit experts on Hopper: one persistent launch streams every chosen expert's packed weights.
//
// Work is a queue of items, first-stage ones (256 rows: 128 gate and the same 128 up rows, a range of the hidden
// dimension) before second-stage ones (256 rows of the hidden dimension, a range of the intermediate one). Blocks claim
// items in order with one atomic, so whatever an item waits for has been claimed by a block that runs: no deadlock,
// however few of the blocks, one an SM, another stream's launches leave room for. In a block, one thread requests
// weights without ever waiting for activations, three warps (one for few tokens in bf16) copy the tokens' rows, two
// or four warpgroups unpack weights into registers and multiply (weights are the 64-row operand, tokens the narrow
// one), and in the fused mode four more warps sum finished tokens. Every sum has a fixed order.
#include "fp8_sum.cuh"
#include "w4a16_item.cuh"

namespace w4a16 {

// One thread: claim items, announce them to the block, request their weights.
template <class C>
__device__ __forceinline__ void feed_weights(const Args& a, Smem<C>& s, int tiles, int total, int item) {
  // With few tokens most experts have one tile: what the L2 need not keep of weights it keeps of the pairs' outputs.
  constexpr int kScales = kScaleBytes<typename C::Format>;
  constexpr uint64_t kPolicy = C::FUSED || C::E4M3 ? kEvictFirst : kEvictNormal;
  const int groups = a.inter / 128, slabs = a.hidden / 256;
  int seq = 0;
  for (int round = 0;; ++round) {
    const int slot = round % kRing;
    if (round >= kRing) mbar_wait(&s.item_empty[slot], ((round / kRing) - 1) & 1);
    s.ring[slot] = item < total ? item : -1;
    mbar_arrive(&s.item_full[slot]);
    if (item >= total) break;
    const int next = atomicAdd(a.ctrl, 1);
    const Item it = decode_item<C>(a, s, item, tiles);
    const int expert = moe::load_tile<C::FUSED>(a, s, it.tile).x;
    const bool packed = !(C::W2_BF16 && it.stage);
    const int chunks = it.stage ? a.inter / (C::W2_BF16 ? 32 : 128) : a.hidden / 128;
    const char* weights = static_cast<const char*>(it.stage ? a.w2 : a.w13);
    const char* scales = reinterpret_cast<const char*>(it.stage ? a.s2 : a.s13);
    for (int slab = 0; slab < it.slabs; ++slab) {
      const size_t row = (size_t)expert * (it.stage ? slabs : groups) + it.group + slab;
      for (int kb = it.kb0; kb < it.kb1; ++kb, ++seq) {
        const int st = seq % C::STAGES, before = seq - a.in_flight;
        if (seq >= C::STAGES) mbar_wait(&s.empty[st], ((seq / C::STAGES) - 1) & 1);
        if (before >= 0) mbar_wait(&s.weights_full[before % C::STAGES], (before / C::STAGES) & 1);
        mbar_arrive_expect_tx(&s.weights_full[st], kChunkBytes + (packed ? kScales : 0));
        bulk_load(s.w[st], weights + (row * chunks + kb) * kChunkBytes, kChunkBytes, &s.weights_full[st], kPolicy);
        if (packed)
          bulk_load(s.scale[st], scales + (row * chunks + kb) * kScales, kScales, &s.weights_full[st], kPolicy);
      }
    }
    item = next;
  }
  // The last block to run out of work opens the next launch.
  if (atomicInc(reinterpret_cast<unsigned*>(a.ctrl) + 1, gridDim.x - 1) == gridDim.x - 1) {
    a.ctrl[0] = 0;
    a.ctrl[2] = s.epoch;
  }
}

// Source row of token c of the tile.
template <class C>
__device__ __forceinline__ int token_row(const Args& a, Smem<C>& s, const Item& it, const int4& tile, int c) {
  const int row = tile.y + c;
  if (it.stage) return row;
  if constexpr (C::FUSED) return s.route.slot_pair[row] / a.top_k;
  else return moe::load_written(a.sorted_pair + row) / a.top_k;
}

// What the claiming thread has announced, item by item, for one warp.
template <class C, class Work>
__device__ __forceinline__ void for_each_item(const Args& a, Smem<C>& s, int tiles, int lane, Work work) {
  for (int round = 0;; ++round) {
    const int slot = round % kRing;
    mbar_wait(&s.item_full[slot], (round / kRing) & 1);
    const int item = s.ring[slot];
    if (item < 0) break;
    const Item it = decode_item<C>(a, s, item, tiles);
    int4 tile = moe::load_tile<C::FUSED>(a, s, it.tile);
    if (C::FUSED) tile.w = a.unpaired;
    work(it, tile);
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.item_empty[slot]);
  }
}

// One warp, a lane a token: for each item, wait until its input exists, then request it chunk by chunk.
template <class C>
__device__ __forceinline__ void feed_few_tokens(const Args& a, Smem<C>& s, int tiles, int lane) {
  int seq = 0;
  for_each_item<C>(a, s, tiles, lane, [&](const Item& it, const int4& tile) {
    const int width = it.stage ? a.inter : a.hidden, columns = it.stage ? 32 : 128;
    const char* src = static_cast<const char*>(it.stage ? a.inter_q : a.x);
    if (lane < tile.z) src += (size_t)token_row(a, s, it, tile, lane) * width * 2;
    if (it.stage == 1) {
      moe::wait_for_tile(a, it.tile, s.epoch, lane);
      fence_proxy_global();
    }
    for (int slab = 0; slab < it.slabs; ++slab)
      for (int kb = it.kb0; kb < it.kb1; ++kb, ++seq) {
        const int st = seq % C::STAGES;
        if (seq >= C::STAGES) mbar_wait(&s.empty[st], ((seq / C::STAGES) - 1) & 1);
        __syncwarp();
        if (lane == 0) mbar_arrive_expect_tx(&s.full[st], tile.z * columns * 2);
        __syncwarp();
        if (lane < tile.z)
          bulk_load(s.b[st] + lane * C::PITCH, src + kb * columns * 2, columns * 2, &s.full[st], kEvictNormal);
      }
  });
}

// Three warps, each every third stage of the ring: as soon as an item's input exists, its tokens' records.
template <class C>
__device__ __forceinline__ void feed_records(const Args& a, Smem<C>& s, int tiles, int me, int lane) {
  int seq = 0;
  for_each_item<C>(a, s, tiles, lane, [&](const Item& it, const int4& tile) {
    const int row = lane < tile.z ? token_row(a, s, it, tile, lane) : 0;
    const RecordCopy<C> copy(it.stage ? a.inter_q : a.xs, (it.stage ? a.inter : a.hidden) / 128, row, tile, lane);
    const int begin = seq;
    if (it.stage == 1) moe::wait_for_tile(a, it.tile, s.epoch, lane);
    for (int slab = 0; slab < it.slabs; ++slab)
      for (int kb = it.kb0; kb < it.kb1; ++kb, ++seq) {
        const int st = seq % C::STAGES;
        if (st % 3 != me) continue;
        if (seq >= C::STAGES) mbar_wait(&s.empty[st], ((seq / C::STAGES) - 1) & 1);
        if (seq - begin < C::STAGES) clear_unused<C>(a, s, st, tile, lane);
        copy(s, st, kb, lane);
        cp_async_arrive(&s.full[st]);
      }
  });
}

// One item's chunks, by three warps with ordinary asynchronous copies, which can write the swizzled rows of gathered
// tokens. PARTS lanes copy a row's part of a chunk, 16 bytes each (twice, 64 columns apart, where a chunk has 128); the
// swizzles of two tokens that a lane copies one after the other differ by the same bit. `source` finds a token's row.
template <int PARTS, class C, class Source>
__device__ __forceinline__ void fill_item(const Args& a, Smem<C>& s, const Item& it, int n, int t, const char* from,
                                          int& seq, Source source) {
  constexpr int kStep = kFillThreads / PARTS, kRows = (C::NMAX + kStep - 1) / kStep, kHalves = PARTS / 4;
  static_assert(kStep % 8 == 4 || kStep % 8 == 0, "swizzle");
  const int c0 = t / PARTS, part = t % PARTS, nk = it.kb1 - it.kb0;
  const uint32_t place = c0 * 128 + ((part ^ (c0 & 7)) << 4), other = kStep % 8 ? place ^ 64 : place;
  const int pitch = (it.stage ? a.inter : a.hidden) / 8;  // of a row, in 16 bytes
  unsigned rows[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = c0 + kStep * i < n ? source(c0 + kStep * i) * pitch + part : 0;
  for (int slab = 0; slab < it.slabs; ++slab)
    for (int kb = 0; kb < nk; ++kb, ++seq) {
      const int st = seq % C::STAGES;
      if (seq >= C::STAGES) mbar_wait(&s.empty[st], ((seq / C::STAGES) - 1) & 1);
      // Where the ring holds a whole number of slabs, an earlier one left the same columns in this stage.
      if (slab * nk < C::STAGES || C::STAGES % nk) {
        const uint32_t even = smem_u32(s.b[st]) + place, odd = smem_u32(s.b[st]) + other;
        const char* at = from + (it.kb0 + kb) * PARTS * kHalves * 16;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          if (c0 + kStep * i < n)
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
              cp_async_16((i & 1 ? odd : even) + i * kStep * 128 + half * C::NMAX * 128,
                          at + (size_t)rows[i] * 16 + half * 128);
      }
      cp_async_arrive(&s.full[st]);
    }
}

// Many tokens: as soon as an item's input exists, its chunks.
template <class C>
__device__ __forceinline__ void feed_many_tokens(const Args& a, Smem<C>& s, int tiles, int t) {
  int seq = 0;
  for_each_item<C>(a, s, tiles, t & 31, [&](const Item& it, const int4& tile) {
    if (it.stage == 1) moe::wait_for_tile(a, it.tile, s.epoch, t & 31);
    const char* from = static_cast<const char*>(it.stage ? a.inter_q : a.x);
    auto source = [&](int c) { return unsigned(token_row(a, s, it, tile, c)); };
    if (C::W2_BF16 && it.stage) fill_item<4, C>(a, s, it, tile.z, t, from, seq, source);
    else fill_item<8, C>(a, s, it, tile.z, t, from, seq, source);
  });
}

template <int NT, class C>
__device__ __forceinline__ void process_slabs(const Args& a, Smem<C>& s, Item it, int4 tile, int& seq, int& events) {
  for (int slab = 0; slab < it.slabs; ++slab, ++it.group) process_item<NT, C>(a, s, it, tile, seq, events);
}

template <class C>
__device__ __forceinline__ void consume(const Args& a, Smem<C>& s, int tiles) {
  const int lane = threadIdx.x & 31;
  int seq = 0, events = 0;
  for_each_item<C>(a, s, tiles, lane, [&](const Item& it, const int4& tile) {
    const int n = tile.z;
    if constexpr (C::NMAX == 16) {
      if (n <= 8) process_slabs<8, C>(a, s, it, tile, seq, events);
      else process_slabs<16, C>(a, s, it, tile, seq, events);
    } else if constexpr (C::NMAX == 32) {
      if (n <= 8) process_slabs<8, C>(a, s, it, tile, seq, events);
      else if (n <= 16) process_slabs<16, C>(a, s, it, tile, seq, events);
      else if (n <= 24) process_slabs<24, C>(a, s, it, tile, seq, events);
      else process_slabs<32, C>(a, s, it, tile, seq, events);
    } else if constexpr (C::NMAX == 64) {
      if (n <= 32) process_slabs<32, C>(a, s, it, tile, seq, events);
      else if (n <= 48) process_slabs<48, C>(a, s, it, tile, seq, events);
      else process_slabs<64, C>(a, s, it, tile, seq, events);
    } else {
      if (n <= 64) process_slabs<64, C>(a, s, it, tile, seq, events);
      else if (n <= 96) process_slabs<96, C>(a, s, it, tile, seq, events);
      else if (n <= 112) process_slabs<112, C>(a, s, it, tile, seq, events);
      else if (n <= 120) process_slabs<120, C>(a, s, it, tile, seq, events);
      else process_slabs<128, C>(a, s, it, tile, seq, events);
    }
  });
  if constexpr (C::FUSED) {  // a goodbye to the summing warps
    const int slot = events % kRing;
    if (events >= kRing) mbar_wait(&s.epi_empty[slot], ((events / kRing) - 1) & 1);
    if (threadIdx.x == 128) s.epi_tile[slot] = -1;
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.epi_full[slot]);
  }
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) w4a16_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<C>& s = *reinterpret_cast<Smem<C>*>(raw);  // swizzled tiles need the base aligned to 1024 bytes: checked below
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  constexpr bool kMoveRegisters = C::WARPGROUPS == 2;
  if (tid == 0) {
    if (smem_u32(raw) & 1023) __trap();
    for (int i = 0; i < C::STAGES; ++i) {
      mbar_init(&s.weights_full[i], 1);
      mbar_init(&s.full[i], C::ROWS ? 1 : C::E4M3 ? 32 : kFillThreads);
      mbar_init(&s.empty[i], C::E4M3 ? 4 : C::CONSUMERS / 32);  // e4m3: one warpgroup a chunk
    }
    for (int i = 0; i < kRing; ++i) {
      mbar_init(&s.item_full[i], 1);
      mbar_init(&s.item_empty[i], (C::ROWS ? 1 : kFillThreads / 32) + C::CONSUMERS / 32);
      mbar_init(&s.epi_full[i], C::CONSUMERS / 32);
      mbar_init(&s.epi_empty[i], moe::kSumWarps);
    }
    fence_mbar_init();
  }
  if constexpr (C::E4M3) {
    if (tid < C::STAGES) s.held[tid] = 0;
    if (tid < C::NMAX) {
      s.amax[tid] = 0;
      for (int k = 0; k < 4; ++k) s.sums[tid][k] = 0;
    }
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
  if constexpr (C::FUSED) {
    if constexpr (C::ROWS) {  // the tokens go to the L2 before the weights' requests queue up in front of them
      const size_t line = (size_t)blockIdx.x * C::THREADS + tid;
      if (line < (size_t)a.tokens * a.hidden / 64) prefetch_l2(static_cast<const char*>(a.x) + line * 128);
    }
    static_assert(C::THREADS >= 512 && sizeof(s.w) >= 16 * moe::kMaxExperts + 4 * C::THREADS, "needs of the sort");
    moe::align_fused(a, s.route, s.w[0], C::NMAX);
    fence_proxy_async();  // the scratch becomes a landing zone of the copy engine
  }
  __syncthreads();
  int tiles;
  if constexpr (C::FUSED) tiles = s.route.num_tiles;
  else tiles = *a.num_tiles;

  if (warp < 4) {
    if constexpr (kMoveRegisters) reg_dealloc<56>();
    if (tid == 0) {
      const int groups = a.inter / 128, slabs = a.hidden / 256;
      s.splits1 = C::FEW ? first_splits(a, tiles) : 1;
      feed_weights<C>(a, s, tiles, tiles * (groups * s.splits1 + slabs / a.item_slabs * a.splits2), first);
    } else if (C::ROWS ? warp == 1 : warp > 0) {
      if constexpr (C::E4M3) feed_records<C>(a, s, tiles, warp - 1, lane);
      else if constexpr (C::FEW) feed_few_tokens<C>(a, s, tiles, lane);
      else feed_many_tokens<C>(a, s, tiles, tid - 32);
    }
  } else if (warp < 4 + C::CONSUMERS / 32) {
    if constexpr (kMoveRegisters) reg_alloc<C::FUSED ? 200 : 224>();
    consume<C>(a, s, tiles);
  } else if constexpr (C::FUSED) {
    if constexpr (kMoveRegisters) reg_dealloc<56>();
    for (int t = blockIdx.x; t < a.tokens; t += gridDim.x)
      if (s.route.token_pairs[t] == 0)
        for (int i = tid - 128 - C::CONSUMERS; i < a.hidden / 2; i += 128)
          reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden)[i] = 0;
    moe::sum_completed(a, s, warp - 4 - C::CONSUMERS / 32, weighed_in_sum(a) ? a.topk_weights : nullptr);
  }
}

}  // namespace w4a16
