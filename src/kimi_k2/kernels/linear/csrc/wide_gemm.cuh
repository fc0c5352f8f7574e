// y = x W^T on the tensor cores for many tokens, what block_gemm.cuh computes and with the same bits: x in e4m3 in one
// or two TERMS, with a float32 scale a token and 128 columns, W in e4m3 with one a 128x128 block, sums in float32, y in
// bf16.
//
// Here the tokens are the 64-row operand, 64 of them a warpgroup, and ROWS rows of W the wide one: a thread has two
// tokens, so that two factors scale a whole block of 128 columns, or four where the rows lie in two blocks of W's
// scales. A tile is GROUPS times 64 tokens by ROWS rows of W, any multiple of eight: which one divides a weight and a
// number of tokens into whole rounds of the SMs is chosen. Every thread block takes one tile after the other; its ring
// is filled for the next one while this one's values leave through the copy engine. Few tiles: the blocks of a cluster
// share one, each a part of the columns, and sum it as block_gemm.cuh says.
//
// In one run on an H200 pairs of thread blocks that share W's way to their shared memory by multicast were up to 10 %
// slower, and tiles of 256 rows, whose sums leave registers for one block's products alone, up to 1.8 times.
#pragma once
#include "block_gemm.cuh"

namespace linear {

constexpr int kWideStripe = 16;  // tiles of rows that share their tokens' way through the L2

// Threads and registers of a thread block with so many multiplying warpgroups beside the one that feeds.
template <int GROUPS>
struct WideBlock {
  static constexpr int kTokens = 64 * GROUPS, kWarps = 4 * GROUPS, kThreads = 128 * (1 + GROUPS);
  static constexpr int kBlocks = GROUPS == 1 ? 2 : 1;  // of an SM
  static constexpr int kFeed = 40, kMultiply = GROUPS == 1 ? 216 : 232, kLaunched = 65536 / kBlocks / kThreads / 8 * 8;
  static_assert(128 * (kFeed + GROUPS * kMultiply) <= kLaunched * kThreads, "setmaxnreg would not return");
};

// What a warp's 16 tokens of a tile leave shared memory in: boxes of so many rows of W.
template <int ROWS>
constexpr int kWideBox = ROWS % 64 ? ROWS : 64;

template <int GROUPS, int ROWS, int TERMS, int STAGES>
struct WideMemory {
  static constexpr int kTokens = WideBlock<GROUPS>::kTokens, kRows = ROWS;
  static constexpr int kBytes = ROWS * 128 + TERMS * kTokens * 128 + kTokens * 4;  // of a stage
  struct Ring {
    alignas(1024) unsigned char w[STAGES][ROWS * 128];
    alignas(1024) unsigned char x[STAGES][TERMS][kTokens * 128];
  };
  union {
    Ring ring;
    alignas(1024) float sums[kTokens][ROWS + 4];  // of this block's part of the columns
  };
  alignas(1024) unsigned char staged[WideBlock<GROUPS>::kWarps][16 * ROWS * 2];
  alignas(128) float scale[STAGES][kTokens];
  alignas(8) uint64_t full[STAGES], empty[STAGES];
};

// Stripes of kWideStripe tiles of rows, one after the other; in a stripe, tiles of the same tokens follow each other.
template <int GROUPS, int ROWS>
struct WideTiles {
  static constexpr int kTokens = WideBlock<GROUPS>::kTokens;
  int rows, tokens;
  __host__ __device__ __forceinline__ explicit WideTiles(const GemmArguments& a)
      : rows((a.rows + ROWS - 1) / ROWS), tokens((a.tokens + kTokens - 1) / kTokens) {}
  __host__ __device__ __forceinline__ int count() const { return rows * tokens; }
  __device__ __forceinline__ Tile at(int tile) const {
    const int stripe = tile / (kWideStripe * tokens), inside = tile % (kWideStripe * tokens);
    const int width = min(kWideStripe, rows - stripe * kWideStripe);
    return {(stripe * kWideStripe + inside % width) * ROWS, inside / width * kTokens};
  }
};

// Whether blocks may share a tile of so many rows: larger ones leave no registers for it.
template <int ROWS>
constexpr bool kWideShared = ROWS <= 144;

// Which blocks of columns of which tiles a thread block takes.
template <int ROWS>
struct WideShare {
  int cluster, rank, first, step, begin, end;
  __device__ __forceinline__ explicit WideShare(const GemmArguments& a)
      : cluster(kWideShared<ROWS> ? a.cluster : 1),
        rank(blockIdx.x % cluster),
        first(blockIdx.x / cluster),
        step(gridDim.x / cluster) {
    const int blocks = a.columns / 128;
    begin = rank * blocks / cluster, end = (rank + 1) * blocks / cluster;
  }
};

// One thread: every tile's blocks of columns into the ring.
template <int GROUPS, int ROWS, int TERMS, int STAGES>
__device__ __forceinline__ void feed_wide(const GemmArguments& a, WideMemory<GROUPS, ROWS, TERMS, STAGES>& m,
                                          const CUtensorMap& weights, const CUtensorMap& tokens) {
  const WideTiles<GROUPS, ROWS> tiles(a);
  const WideShare<ROWS> share(a);
  auto request_weights = [&](int st, int row, int kb) {
    mbar_arrive_expect_tx(&m.full[st], m.kBytes);
    tma_load_2d(smem_u32(m.ring.w[st]), &weights, &m.full[st], kb * 128, row, kEvictNormal);
  };
  auto request_tokens = [&](int st, int token, int kb) {
#pragma unroll
    for (int i = 0; i < TERMS; ++i)  // a ragged last tile ends in the next term's first tokens, which nobody stores
      tma_load_2d(smem_u32(m.ring.x[st][i]), &tokens, &m.full[st], kb * 128, i * a.tokens + token, kEvictNormal);
    bulk_load(m.scale[st], a.token_scale + (size_t)kb * a.token_stride + token, m.kTokens * 4, &m.full[st],
              kEvictNormal);
  };
  int seq = 0;
  for (int t = share.first; t < tiles.count(); t += share.step) {
    const Tile tile = tiles.at(t);
    int kb = share.begin;
    if (seq == 0) {  // the weights do not depend on the launch before this one
      seq = min(STAGES, share.end - share.begin);
      for (int i = 0; i < seq; ++i) request_weights(i, tile.row, kb + i);
      pdl_wait();
      for (int i = 0; i < seq; ++i) request_tokens(i, tile.token, kb + i);
      kb += seq;
    }
    for (; kb < share.end; ++kb, ++seq) {
      const int st = seq % STAGES;
      if (seq >= STAGES) mbar_wait(&m.empty[st], ((seq / STAGES) - 1) & 1);
      request_weights(st, tile.row, kb);
      request_tokens(st, tile.token, kb);
    }
  }
}

// A warp's 16 tokens of a tile, through shared memory. A lane has tokens g and g + 8: acc[4 j + k] and [4 j + 2 + k]
// are of row 8 j + 2 q + k. Boxes of 64 rows lie there with the swizzle of 128 bytes, others row after row.
template <int ROWS>
__device__ __forceinline__ void store_wide(unsigned char* staged, const CUtensorMap& out, int row, int token,
                                           const float (&acc)[ROWS / 2]) {
  constexpr int kBox = kWideBox<ROWS>, kPitch = kBox * 2;
  const int lane = threadIdx.x & 31, mine = (lane & 7) + ((lane >> 3) & 1) * 8, half = lane >> 4;
  const uint32_t at = smem_u32(staged) + mine * kPitch;
  if (lane == 0) bulk_wait_read();  // the tile before has left
  __syncwarp();
#pragma unroll
  for (int j = 0; j < ROWS / 8; j += 2) {
    const float* of = acc + 4 * j;
    const int inside = j % (kBox / 8) + half, unit = kBox == 64 ? inside ^ (mine & 7) : inside;
    const uint32_t put = at + j / (kBox / 8) * (16 * kPitch) + unit * 16;
    const uint32_t first = pack_bf16(of[0], of[1]), second = pack_bf16(of[2], of[3]);
    if (j + 1 < ROWS / 8) stmatrix_x4(put, first, second, pack_bf16(of[4], of[5]), pack_bf16(of[6], of[7]));
    else stmatrix_x2(put, first, second);
  }
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int h = 0; h < ROWS / kBox; ++h) tma_store_2d(&out, smem_u32(staged) + h * 16 * kPitch, row + h * kBox, token);
    bulk_commit();
  }
}

// A warp's 16 tokens of a shared tile, to where the other blocks find them. The ring has been read.
template <int ROWS>
__device__ __forceinline__ void publish_wide(float (*sums)[ROWS + 4], const float (&acc)[ROWS / 2]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(&sums[g + 8 * h][8 * j + 2 * q]) =
          make_float2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
}

// One of the warpgroups: 64 tokens of every tile.
template <int GROUPS, int ROWS, int TERMS, int STAGES>
__device__ __forceinline__ void multiply_wide(const GemmArguments& a, WideMemory<GROUPS, ROWS, TERMS, STAGES>& m,
                                              const CUtensorMap& out) {
  constexpr int kTokens = WideBlock<GROUPS>::kTokens;
  constexpr int kScales = 128 % ROWS == 0 ? 1 : 2;  // blocks of W's scales that a tile's rows lie in
  constexpr int kBuffers = ROWS <= 128 ? 2 : 1;     // sums of a block of columns that registers have room for
  const WideTiles<GROUPS, ROWS> tiles(a);
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x & 31, group = __shfl_sync(0xffffffffu, warp / 4, 0);
  const WideShare<ROWS> share(a);
  const int blocks = share.end - share.begin, mine = warp * 16 + (lane >> 2);
  const uint64_t left0 = desc_sw128(smem_u32(m.ring.x[0][0]) + group * 8192);
  const uint64_t right0 = desc_sw128(smem_u32(m.ring.w[0]));
  auto release = [&](int st, uint32_t read = 0) {
    __syncwarp();
    if (lane == 0) mbar_arrive_behind(&m.empty[st], read);
  };
  int st = 0, phase = 0;
  auto advance = [&] {
    st = st == STAGES - 1 ? 0 : st + 1;
    phase ^= st == 0;
  };
  for (int t = share.first; t < tiles.count(); t += share.step) {
    const Tile tile = tiles.at(t);
    if (tile.token + group * 64 >= a.tokens) {  // no tokens of this warpgroup's
      for (int kb = 0; kb < blocks; ++kb, advance()) {
        mbar_wait(&m.full[st], phase);
        release(st);
      }
      if (share.cluster > 1) named_sync(1, 32 * WideBlock<GROUPS>::kWarps);
      continue;
    }
    const float* scales = a.weight_scale + (size_t)(tile.row / 128) * (a.columns / 128) + share.begin;
    // The second block's may not exist; then it is of rows that are not stored.
    const float* others = scales + (tile.row / 128 + 1 < (a.rows + 127) / 128 ? a.columns / 128 : 0);
    const int own = (128 - tile.row % 128) / 8;  // groups of eight rows in the first
    float acc[ROWS / 2], next[kScales];
    auto request = [&](int kb) {
      next[0] = __ldg(scales + min(kb, blocks - 1));
      if constexpr (kScales == 2) next[1] = __ldg(others + min(kb, blocks - 1));
    };
    request(0);
#pragma unroll
    for (int k = 0; k < ROWS / 2; ++k) acc[k] = 0.f;
    float sum[kBuffers][ROWS / 2], c[kBuffers][2];
    int at[kBuffers];
    auto begin = [&](int b) {
      at[b] = __shfl_sync(0xffffffffu, st, 0);
      mbar_wait(&m.full[at[b]], phase);
      // compute-sanitizer (CUDA 13.0): racecheck names these reads and the copy of the stage's next scales, as a warp's
      // first lane arrives for all behind __syncwarp, which it does not follow; initcheck names what pads the scales.
      c[b][0] = m.scale[at[b]][mine], c[b][1] = m.scale[at[b]][mine + 8];
      const uint64_t left = left0 + at[b] * (sizeof(m.ring.x[0]) >> 4),
                     right = right0 + at[b] * (sizeof(m.ring.w[0]) >> 4);
      wgmma_fence();
#pragma unroll
      for (int term = 0; term < TERMS; ++term)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          WgmmaE4m3<ROWS>::go(sum[b], left + term * (kTokens * 128 >> 4) + 2 * k, right + 2 * k, term + k > 0);
      wgmma_commit();
      advance();
    };
    auto finish = [&](int b, int kb) {
      const float own0 = c[b][0] * next[0], own1 = c[b][1] * next[0];
      const float other0 = c[b][0] * next[kScales - 1], other1 = c[b][1] * next[kScales - 1];
      request(kb + 1);
      release(at[b], __float_as_uint(c[b][0]) | __float_as_uint(c[b][1]));
      fence_regs(sum[b]);
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) {
        const bool second = kScales == 2 && j >= own;
        const float s0 = second ? other0 : own0, s1 = second ? other1 : own1;
        acc[4 * j] += sum[b][4 * j] * s0;
        acc[4 * j + 1] += sum[b][4 * j + 1] * s0;
        acc[4 * j + 2] += sum[b][4 * j + 2] * s1;
        acc[4 * j + 3] += sum[b][4 * j + 3] * s1;
      }
    };
    if constexpr (kBuffers == 2) {  // the next block's products are under way while this one is added
      begin(0);
      int kb = 0;
      for (; kb + 2 < blocks; kb += 2) {
        begin(1);
        wgmma_wait<1>();
        finish(0, kb);
        begin(0);
        wgmma_wait<1>();
        finish(1, kb + 1);
      }
      if (kb + 1 < blocks) {
        begin(1);
        wgmma_wait<1>();
        finish(0, kb);
        wgmma_wait<0>();
        finish(1, kb + 1);
      } else {
        wgmma_wait<0>();
        finish(0, kb);
      }
    } else {
      for (int kb = 0; kb < blocks; ++kb) {
        begin(0);
        wgmma_wait<0>();
        finish(0, kb);
      }
    }
    if (share.cluster > 1) {
      named_sync(1, 32 * WideBlock<GROUPS>::kWarps);
      publish_wide<ROWS>(m.sums + warp * 16, acc);
      continue;
    }
    const int token = tile.token + warp * 16;
    if (token < a.tokens) store_wide<ROWS>(m.staged[warp], out, tile.row, token, acc);
  }
  if (share.cluster > 1) {
    decode::cluster_arrive();
    decode::cluster_wait();
    sum_blocks<WideMemory<GROUPS, ROWS, TERMS, STAGES>, kTokens>(a, m, tiles.at(share.first), share.rank,
                                                                 threadIdx.x - 128, 32 * WideBlock<GROUPS>::kWarps);
    decode::cluster_arrive();  // no block ends while another reads its memory
    decode::cluster_wait();
  } else if (lane == 0) {
    bulk_wait();
  }
}

template <int GROUPS, int ROWS, int TERMS, int STAGES>
__global__ void __launch_bounds__(WideBlock<GROUPS>::kThreads, WideBlock<GROUPS>::kBlocks)
    wide_gemm(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens,
              const __grid_constant__ CUtensorMap out, const GemmArguments a) {
  using Memory = WideMemory<GROUPS, ROWS, TERMS, STAGES>;
  extern __shared__ __align__(1024) unsigned char raw[];
  Memory& m = *reinterpret_cast<Memory*>(raw);
  if (threadIdx.x == 0) {
    if (smem_u32(raw) & 1023) __trap();
    prefetch_tensormap(&weights);
    prefetch_tensormap(&tokens);
    prefetch_tensormap(&out);
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(&m.full[i], 1);
      mbar_init(&m.empty[i], WideBlock<GROUPS>::kWarps);
    }
    fence_mbar_init();
  }
  pdl_launch();
  __syncthreads();
  if (threadIdx.x < 128) {
    reg_dealloc<WideBlock<GROUPS>::kFeed>();
    if (threadIdx.x == 0) feed_wide(a, m, weights, tokens);
    for (int i = 0; i < 2 && kWideShared<ROWS> && a.cluster > 1; ++i) decode::cluster_arrive(), decode::cluster_wait();
  } else {
    reg_alloc<WideBlock<GROUPS>::kMultiply>();
    multiply_wide(a, m, out);
  }
}

}  // namespace linear
