// y = x W^T on the tensor cores for many tokens, what block_gemm.cuh computes and, but in turns, with the same bits: x
// in e4m3 in one or two TERMS, with a float32 scale a token and 128 columns, W in e4m3 with one a 128x128 block, sums
// in float32, y in bf16.
//
// Here the tokens are the 64-row operand, 64 of them a warpgroup, and ROWS rows of W the wide one: a thread has two
// tokens, so that two factors scale a whole block of 128 columns, or four where the rows lie in two blocks of W's
// scales. A tile is GROUPS times 64 tokens by ROWS rows of W, any multiple of eight: which one divides a weight and a
// number of tokens into whole rounds of the SMs is chosen. Every thread block takes one tile after the other; its ring
// is filled for the next one while this one's values leave through the copy engine. Few tiles: the blocks of a cluster
// share one, each a part of the columns, and sum it as block_gemm.cuh says.
//
// A tile of 64 tokens and more than 64 rows has a whole SM: two warpgroups take turns at its blocks of columns, one
// multiplies while the other scales, and the sums of both are added at the end. Fewer tokens are padding than in a tile
// of 128.
//
// In one run on an H200 pairs of thread blocks that share W's way to their shared memory by multicast were up to 10 %
// slower, and tiles of 256 rows, whose sums leave registers for one block's products alone, up to 1.8 times.
#pragma once
#include "block_gemm.cuh"

namespace linear {

constexpr int kWideStripe = 16;  // tiles of rows that share their tokens' way through the L2

// Threads and registers of a thread block: its multiplying warpgroups beside the one that feeds. A tile of 64 tokens
// and many rows is multiplied by two warpgroups in TURNS, a block of 128 columns each.
template <int GROUPS, int ROWS>
struct WideBlock {
  static constexpr int kTurns = GROUPS == 1 && ROWS > 64 ? 2 : 1, kMultiplying = GROUPS * kTurns;
  // In turns one warp takes longer to ask for a block of columns than the tensor cores to multiply it; else more are
  // slower.
  static constexpr int kFeeding = kTurns == 2 ? 4 : 1;
  static constexpr int kTokens = 64 * GROUPS, kWarps = 4 * GROUPS, kThreads = 128 * (1 + kMultiplying);
  static constexpr int kBlocks = kMultiplying == 1 ? 2 : 1;  // of an SM
  static constexpr int kFeed = 40, kMultiply = kMultiplying == 1 ? 216 : 232;
  static constexpr int kLaunched = 65536 / kBlocks / kThreads / 8 * 8;
  static_assert(128 * (kFeed + kMultiplying * kMultiply) <= kLaunched * kThreads, "setmaxnreg would not return");
};

// What a warp's 16 tokens of a tile leave shared memory in: boxes of so many rows of W.
template <int ROWS>
constexpr int kWideBox = ROWS % 64 ? ROWS : 64;

template <int GROUPS, int ROWS, int TERMS, int STAGES>
struct WideMemory {
  using Block = WideBlock<GROUPS, ROWS>;
  static constexpr int kTokens = Block::kTokens, kRows = ROWS;
  static constexpr int kBytes = ROWS * 128 + TERMS * kTokens * 128 + kTokens * 4;  // of a stage
  struct Ring {
    alignas(1024) unsigned char w[STAGES][ROWS * 128];
    alignas(1024) unsigned char x[STAGES][TERMS][kTokens * 128];
  };
  union {
    Ring ring;
    alignas(1024) float sums[kTokens][ROWS + 4];  // of this block's part of the columns
  };
  // A warp's values of a tile; before them, in turns, the other warpgroup's sums.
  alignas(1024) unsigned char staged[Block::kWarps][16 * ROWS * (Block::kTurns == 2 ? 4 : 2)];
  alignas(128) float scale[STAGES][kTokens];
  alignas(8) uint64_t full[STAGES], empty[STAGES];
};

// Stripes of kWideStripe tiles of rows, one after the other; in a stripe, tiles of the same tokens follow each other.
template <int GROUPS, int ROWS>
struct WideTiles {
  static constexpr int kTokens = 64 * GROUPS;
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

// One thread of each feeding warp: every tile's blocks of columns into the ring.
template <int GROUPS, int ROWS, int TERMS, int STAGES>
__device__ __forceinline__ void feed_wide(const GemmArguments& a, WideMemory<GROUPS, ROWS, TERMS, STAGES>& m,
                                          const CUtensorMap& weights, const CUtensorMap& tokens) {
  const WideTiles<GROUPS, ROWS> tiles(a);
  const WideShare<ROWS> share(a);
  int seq = 0;
  for (int t = share.first; t < tiles.count(); t += share.step, seq += share.end - share.begin) {
    const Tile tile = tiles.at(t);
    feed_tile<STAGES, WideBlock<GROUPS, ROWS>::kFeeding>(
        m, seq, share.end - share.begin,
        [&](int st, int i) {
          mbar_arrive_expect_tx(&m.full[st], m.kBytes);
          tma_load_2d(smem_u32(m.ring.w[st]), &weights, &m.full[st], (share.begin + i) * 128, tile.row, kEvictNormal);
        },
        [&](int st, int i) {
          const int kb = share.begin + i;
#pragma unroll
          for (int n = 0; n < TERMS;
               ++n)  // a ragged last tile ends in the next term's first tokens: nobody stores them
            tma_load_2d(smem_u32(m.ring.x[st][n]), &tokens, &m.full[st], kb * 128, n * a.tokens + tile.token,
                        kEvictNormal);
          bulk_load(m.scale[st], a.token_scale + (size_t)kb * a.token_stride + tile.token, m.kTokens * 4, &m.full[st],
                    kEvictNormal);
        });
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

// In turns: the second warpgroup's sums go to the first, which adds them to its own.
template <int ROWS>
__device__ __forceinline__ void give_turns(unsigned char* staged, const float (&acc)[ROWS / 2]) {
  float4* to = reinterpret_cast<float4*>(staged) + (threadIdx.x & 31);
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j)
    to[j * 32] = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
}
template <int ROWS>
__device__ __forceinline__ void take_turns(const unsigned char* staged, float (&acc)[ROWS / 2]) {
  const float4* from = reinterpret_cast<const float4*>(staged) + (threadIdx.x & 31);
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j) {
    const float4 v = from[j * 32];
    acc[4 * j] += v.x, acc[4 * j + 1] += v.y, acc[4 * j + 2] += v.z, acc[4 * j + 3] += v.w;
  }
}

// One of the warpgroups: 64 tokens of every tile; in turns, every second block of columns. Which of the two has a
// tile's even blocks depends on the tiles before; the sum of both does not.
template <int GROUPS, int ROWS, int TERMS, int STAGES>
__device__ __forceinline__ void multiply_wide(const GemmArguments& a, WideMemory<GROUPS, ROWS, TERMS, STAGES>& m,
                                              const CUtensorMap& out) {
  using Block = WideBlock<GROUPS, ROWS>;
  constexpr int kTokens = Block::kTokens, kTurns = Block::kTurns;
  constexpr int kScales = 128 % ROWS == 0 ? 1 : 2;  // blocks of W's scales that a tile's rows lie in
  // Sums of a block of columns that registers have room for; in turns, the other warpgroup multiplies meanwhile.
  constexpr int kBuffers = ROWS <= 128 && kTurns == 1 ? 2 : 1;
  const WideTiles<GROUPS, ROWS> tiles(a);
  const int lane = threadIdx.x & 31, number = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
  const int group = kTurns == 2 ? 0 : number, turn = kTurns == 2 ? number : 0;
  const int warp = (threadIdx.x / 32 - 4) % Block::kWarps;
  const WideShare<ROWS> share(a);
  const int blocks = share.end - share.begin, mine = warp * 16 + (lane >> 2);
  const uint64_t left0 = desc_sw128(smem_u32(m.ring.x[0][0]) + group * 8192);
  const uint64_t right0 = desc_sw128(smem_u32(m.ring.w[0]));
  auto release = [&](int st, uint32_t read = 0) {
    __syncwarp();
    if (lane == 0) mbar_arrive_behind(&m.empty[st], read);
  };
  static_assert(STAGES % kTurns == 0,
                "a stage is always the same warpgroup's, which so sees every phase of its barrier");
  int st = turn, phase = 0, first = turn;  // its first block of a tile's columns
  auto advance = [&] {
    st += kTurns;
    if (st >= STAGES) st -= STAGES, phase ^= 1;
  };
  for (int t = share.first; t < tiles.count(); t += share.step) {
    const Tile tile = tiles.at(t);
    if (tile.token + group * 64 >= a.tokens) {  // no tokens of this warpgroup's
      for (int kb = 0; kb < blocks; ++kb, advance()) {
        mbar_wait(&m.full[st], phase);
        release(st);
      }
      if (share.cluster > 1) named_sync(1, 32 * Block::kWarps);
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
    int kb = first;
    request(kb);
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
    auto finish = [&](int b) {
      const float own0 = c[b][0] * next[0], own1 = c[b][1] * next[0];
      const float other0 = c[b][0] * next[kScales - 1], other1 = c[b][1] * next[kScales - 1];
      request(kb += kTurns);
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
      while (kb + 2 < blocks) {
        begin(1);
        wgmma_wait<1>();
        finish(0);
        begin(0);
        wgmma_wait<1>();
        finish(1);
      }
      if (kb + 1 < blocks) {
        begin(1);
        wgmma_wait<1>();
        finish(0);
        wgmma_wait<0>();
        finish(1);
      } else {
        wgmma_wait<0>();
        finish(0);
      }
    } else {
      while (kb < blocks) {
        begin(0);
        wgmma_wait<0>();
        finish(0);
      }
    }
    if constexpr (kTurns == 2) {
      first ^= blocks & 1;
      if (turn == 0 && lane == 0) bulk_wait_read();  // the tile before has left
      __syncwarp();
      named_sync(2, 256);
      if (turn == 1) give_turns<ROWS>(m.staged[warp], acc);
      named_sync(3, 256);
      if (turn == 1) continue;
      take_turns<ROWS>(m.staged[warp], acc);
    }
    if (share.cluster > 1) {
      if constexpr (kTurns == 1) named_sync(1, 32 * Block::kWarps);
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
                                                                 threadIdx.x - 128, 128 * Block::kMultiplying);
    decode::cluster_arrive();  // no block ends while another reads its memory
    decode::cluster_wait();
  } else if (lane == 0) {
    bulk_wait();
  }
}

template <int GROUPS, int ROWS, int TERMS, int STAGES>
__global__ void __launch_bounds__(WideBlock<GROUPS, ROWS>::kThreads, WideBlock<GROUPS, ROWS>::kBlocks)
    wide_gemm(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens,
              const __grid_constant__ CUtensorMap out, const GemmArguments a) {
  using Block = WideBlock<GROUPS, ROWS>;
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
      mbar_init(&m.empty[i], Block::kWarps);
    }
    fence_mbar_init();
  }
  pdl_launch();
  __syncthreads();
  if (threadIdx.x < 128) {
    reg_dealloc<Block::kFeed>();
    if (threadIdx.x % 32 == 0 && threadIdx.x < 32 * Block::kFeeding) feed_wide(a, m, weights, tokens);
    for (int i = 0; i < 2 && kWideShared<ROWS> && a.cluster > 1; ++i) decode::cluster_arrive(), decode::cluster_wait();
  } else {
    reg_alloc<Block::kMultiply>();
    multiply_wide(a, m, out);
  }
}

}  // namespace linear
