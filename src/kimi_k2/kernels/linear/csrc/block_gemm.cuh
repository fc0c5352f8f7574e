// y = x W^T on the tensor cores: x in e4m3 with a float32 scale a token and 128 columns, W in e4m3 with one a 128x128
// block, sums in float32, y in bf16. x may be the sum of two TERMS, the second of them what rounding the first has
// left: they hold bf16's bits, and their products have one sum.
//
// A tile is 64 rows of W by TOKENS tokens. One thread feeds a ring of 128 columns of both through the copy engine; a
// warpgroup multiplies the rows (the left operand) by the tokens and adds every block of 128 columns, scaled, to its
// sums. W does not depend on the launch before this one: the first requests for it go out before that one has ended.
//
// Many tiles: a block takes one after the other, and its ring is filled for the next while this one is stored.
// Few tiles: the blocks of a cluster share one, each a part of the columns; then each sums its share of the tile's
// values over all blocks' shared memory, in the blocks' order.
#pragma once
#include "common/csrc/decode_ptx.cuh"
#include "common/csrc/wgmma.cuh"

namespace linear {

using namespace ptx;

struct GemmArguments {
  const float* token_scale;   // [columns / 128, token_stride]
  const float* weight_scale;  // [ceil(rows / 128), columns / 128]
  __nv_bfloat16* out;         // [tokens, rows]
  int tokens, rows, columns, token_stride, cluster;
  const float* inverse = nullptr;  // dense_gemm.cuh: null, or [tokens], times which sums are taken
};  // x is e4m3 [TERMS, tokens, columns]

constexpr int kStripe = 16;        // tiles of rows that share their tokens' way through the L2
constexpr int kStagedPitch = 144;  // bytes of a token's 64 rows: no two lanes of a store meet a bank

// Registers of a feeding and of a multiplying thread. More than the launch has, and the block would wait for ever.
template <int GROUPS>
struct Registers {
  static constexpr int kFeed = 48, kMultiply = GROUPS == 1 ? 208 : 224, kThreads = 128 * (1 + GROUPS);
  static constexpr int kBlocks = GROUPS == 1 ? 2 : 1, kLaunched = 65536 / kBlocks / kThreads / 8 * 8;
  static_assert(128 * (kFeed + GROUPS * kMultiply) <= kLaunched * kThreads, "setmaxnreg would not return");
};

template <int TOKENS, int TERMS, int STAGES>
struct GemmMemory {
  static_assert(TOKENS % 16 == 0, "whole stores of two matrices of 8 tokens");
  static constexpr int kRows = 64;
  static constexpr int kSumPitch = kRows + 4;  // values: lanes of different tokens meet different banks
  struct Ring {
    alignas(1024) unsigned char w[STAGES][kRows * 128];
    alignas(1024) unsigned char x[STAGES][TERMS][TOKENS * 128];
  };
  union {
    Ring ring;
    alignas(1024) float sums[TOKENS][kSumPitch];  // of this block's part of the columns
  };
  alignas(128) float scale[STAGES][TOKENS];
  alignas(128) unsigned char staged[TOKENS * kStagedPitch];
  alignas(8) uint64_t full[STAGES], empty[STAGES];
};

// A block's beginning: the ring's barriers, and the launch that follows may start.
template <int GROUPS, int STAGES, class Memory>
__device__ __forceinline__ void open_ring(Memory& m, const CUtensorMap& weights, const CUtensorMap& tokens) {
  if (threadIdx.x == 0) {
    if (smem_u32(&m) & 1023) __trap();
    prefetch_tensormap(&weights);
    prefetch_tensormap(&tokens);
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(&m.full[i], 1);
      mbar_init(&m.empty[i], 4 * GROUPS);
    }
    fence_mbar_init();
  }
  pdl_launch();
  __syncthreads();
}

struct Tile {
  int row, token;  // first ones
};

// Stripes of kStripe tiles of rows, one after the other; in a stripe, tiles of the same tokens follow each other.
template <class Memory, int TOKENS>
__device__ __forceinline__ Tile locate(const GemmArguments& a, int tile) {
  const int row_tiles = (a.rows + Memory::kRows - 1) / Memory::kRows, token_tiles = (a.tokens + TOKENS - 1) / TOKENS;
  const int stripe = tile / (kStripe * token_tiles), inside = tile % (kStripe * token_tiles);
  const int width = min(kStripe, row_tiles - stripe * kStripe);
  return {(stripe * kStripe + inside % width) * Memory::kRows, inside / width * TOKENS};
}

// One thread of each of the feeding WARPS: a tile's blocks of columns into the ring. A stage is always the same warp's,
// which so has seen every phase of its barrier before it waits for the next. `seq` are the blocks of the tiles before;
// `weights` and `tokens` ask for block `i` into a stage.
template <int STAGES, int WARPS = 1, class Memory, class Weights, class Tokens>
__device__ __forceinline__ void feed_tile(Memory& m, int seq, int blocks, Weights weights, Tokens tokens) {
  // By a shuffle, so that the compiler knows one value a warp: fewer registers.
  const int warp = WARPS == 1 ? 0 : __shfl_sync(1, threadIdx.x / 32, 0);
  int i = 0;
  if (seq == 0) {  // the weights do not depend on the launch before this one
    i = min(STAGES, blocks);
    for (int st = warp; st < i; st += WARPS) weights(st, st);
    pdl_wait();
    for (int st = warp; st < i; st += WARPS) tokens(st, st);
  }
#pragma unroll 1
  for (; i < blocks; ++i) {
    const int at = seq + i, st = at % STAGES;
    if (WARPS > 1 && st % WARPS != warp) continue;
    if (at >= STAGES) mbar_wait(&m.empty[st], (at / STAGES - 1) & 1);
    weights(st, i);
    tokens(st, i);
  }
}

// Every tile's.
template <class Memory, int TOKENS, int TERMS, int STAGES>
__device__ __forceinline__ void feed(const GemmArguments& a, Memory& m, const CUtensorMap& weights,
                                     const CUtensorMap& tokens, int first, int step, int tiles, int begin, int end) {
  const uint64_t policy = a.tokens <= TOKENS ? kEvictFirst : kEvictNormal;
  int seq = 0;
  for (int t = first; t < tiles; t += step, seq += end - begin) {
    const Tile tile = locate<Memory, TOKENS>(a, t);
    feed_tile<STAGES>(
        m, seq, end - begin,
        [&](int st, int i) {
          mbar_arrive_expect_tx(&m.full[st], Memory::kRows * 128 + TERMS * TOKENS * 128 + TOKENS * 4);
          tma_load_2d(smem_u32(m.ring.w[st]), &weights, &m.full[st], (begin + i) * 128, tile.row, policy);
        },
        [&](int st, int i) {
          const int kb = begin + i;
#pragma unroll
          for (int n = 0; n < TERMS;
               ++n)  // a ragged last tile ends in the next term's first tokens: nobody stores them
            tma_load_2d(smem_u32(m.ring.x[st][n]), &tokens, &m.full[st], kb * 128, n * a.tokens + tile.token,
                        kEvictNormal);
          bulk_load(m.scale[st], a.token_scale + (size_t)kb * a.token_stride + tile.token, TOKENS * 4, &m.full[st],
                    kEvictNormal);
        });
  }
}

// A lane has rows 16 w + g and 8 further of tokens 8 j + 2 q, 8 j + 2 q + 1: acc[4 j], [4 j + 1]; [4 j + 2], [4 j + 3].
// A tile without partners: through shared memory, so that each token's 64 rows leave as one line.
template <class Memory, int TOKENS>
__device__ __forceinline__ void store_tile(const GemmArguments& a, Memory& m, const Tile tile,
                                           const float (&acc)[TOKENS / 2]) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const uint32_t put =
      smem_u32(m.staged) + ((lane >> 4) * 8 + (lane & 7)) * kStagedPitch + thread / 32 * 32 + ((lane >> 3) & 1) * 16;
#pragma unroll
  for (int j = 0; j < TOKENS / 8; j += 2)
    stmatrix_x4_trans(put + j * 8 * kStagedPitch, pack_bf16(acc[4 * j], acc[4 * j + 1]),
                      pack_bf16(acc[4 * j + 2], acc[4 * j + 3]), pack_bf16(acc[4 * j + 4], acc[4 * j + 5]),
                      pack_bf16(acc[4 * j + 6], acc[4 * j + 7]));
  named_sync(2, 128);
  for (int i = thread; i < min(TOKENS, a.tokens - tile.token) * 8; i += 128) {
    const int token = i >> 3, part = i & 7;
    if (tile.row + part * 8 < a.rows)
      *reinterpret_cast<uint4*>(a.out + (size_t)(tile.token + token) * a.rows + tile.row + part * 8) =
          *reinterpret_cast<const uint4*>(m.staged + token * kStagedPitch + part * 16);
  }
  named_sync(2, 128);
}

// This block's part of a shared tile, to where the others find it. The ring has been read.
template <class Memory, int GROUPS, int TOKENS>
__device__ __forceinline__ void publish_sums(Memory& m, const float (&acc)[TOKENS / 2]) {
  const int lane = threadIdx.x % 32, g = lane >> 2, q = lane & 3, row = (threadIdx.x - 128) / 32 * 16 + g;
  named_sync(1, 128 * GROUPS);
#pragma unroll
  for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      m.sums[8 * j + 2 * q + i][row] = acc[4 * j + i];
      m.sums[8 * j + 2 * q + i][row + 8] = acc[4 * j + 2 + i];
    }
}

// This block's share of the tile, eight rows of a token a thread of so many; WIDE: as float32, to where `out` then is
// an array of it.
template <class Memory, int TOKENS, bool WIDE = false>
__device__ __forceinline__ void sum_blocks(const GemmArguments& a, Memory& m, const Tile tile, int rank, int thread,
                                           int threads) {
  constexpr int kParts = Memory::kRows / 8;
  const int tokens = min(TOKENS, a.tokens - tile.token);
  for (int i = thread * a.cluster + rank; i < tokens * kParts; i += threads * a.cluster) {
    const int token = i / kParts, row = i % kParts * 8;
    if (tile.row + row >= a.rows) continue;
    float sum[8] = {};
    for (int c = 0; c < a.cluster; ++c) {
      const float4* from = reinterpret_cast<const float4*>(decode::map_shared_rank(&m.sums[token][row], c));
      const float4 u = from[0], v = from[1];
      sum[0] += u.x, sum[1] += u.y, sum[2] += u.z, sum[3] += u.w;
      sum[4] += v.x, sum[5] += v.y, sum[6] += v.z, sum[7] += v.w;
    }
    if (a.inverse != nullptr) {
      const float factor = __ldcg(a.inverse + tile.token + token);
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] *= factor;
    }
    const size_t at = (size_t)(tile.token + token) * a.rows + tile.row + row;
    if constexpr (WIDE) {
      float4* out = reinterpret_cast<float4*>(reinterpret_cast<float*>(a.out) + at);
      out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
      *reinterpret_cast<uint4*>(a.out + at) = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                                         pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
    }
  }
}

template <int TOKENS, int TERMS, int STAGES>
__global__ void __launch_bounds__(Registers<1>::kThreads, Registers<1>::kBlocks)
    block_gemm(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens,
               const GemmArguments a) {
  using Memory = GemmMemory<TOKENS, TERMS, STAGES>;
  extern __shared__ __align__(1024) unsigned char raw[];
  Memory& m = *reinterpret_cast<Memory*>(raw);
  const int thread = threadIdx.x, lane = thread % 32;
  const int rank = blockIdx.x % a.cluster, blocks = a.columns / 128;
  const int begin = rank * blocks / a.cluster, end = (rank + 1) * blocks / a.cluster;
  const int first = blockIdx.x / a.cluster, step = gridDim.x / a.cluster;
  const int tiles = ((a.rows + Memory::kRows - 1) / Memory::kRows) * ((a.tokens + TOKENS - 1) / TOKENS);
  open_ring<1, STAGES>(m, weights, tokens);

  if (thread < 128) {
    reg_dealloc<Registers<1>::kFeed>();
    if (thread == 0) feed<Memory, TOKENS, TERMS, STAGES>(a, m, weights, tokens, first, step, tiles, begin, end);
  } else {
    reg_alloc<Registers<1>::kMultiply>();
    int seq = 0;
    for (int t = first; t < tiles; t += step) {
      const Tile tile = locate<Memory, TOKENS>(a, t);
      const float* scales = a.weight_scale + (size_t)(tile.row / 128) * blocks;
      float acc[TOKENS / 2];
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) acc[i] = 0.f;
      float sum[2][TOKENS / 2];
      auto multiply = [&](float (&to)[TOKENS / 2], int at) {
        const int st = at % STAGES;
        mbar_wait(&m.full[st], (at / STAGES) & 1);
        const uint64_t left = desc_sw128(smem_u32(m.ring.w[st]));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TERMS; ++i) {
          const uint64_t right = desc_sw128(smem_u32(m.ring.x[st][i]));
#pragma unroll
          for (int k = 0; k < 4; ++k) WgmmaE4m3<TOKENS>::go(to, left + 2 * k, right + 2 * k, i + k > 0);
        }
        wgmma_commit();
      };
      auto promote = [&](float (&from)[TOKENS / 2], int at, float w) {
        const float* scale = m.scale[at % STAGES] + 2 * (lane & 3);
        fence_regs(from);
        uint32_t read = 0;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
          const float2 c = *reinterpret_cast<const float2*>(scale + 8 * j);
          read |= __float_as_uint(c.x);
          const float c0 = c.x * w, c1 = c.y * w;
          float* to = acc + 4 * j;
          to[0] += from[4 * j] * c0;
          to[1] += from[4 * j + 1] * c1;
          to[2] += from[4 * j + 2] * c0;
          to[3] += from[4 * j + 3] * c1;
        }
        __syncwarp();
        if (lane == 0) mbar_arrive_behind(&m.empty[at % STAGES], read);
      };
      auto scale_of = [&](int kb) { return __ldg(scales + min(kb, end - 1)); };
      const int start = seq;
      seq += end - begin;
      // Two blocks of columns at once: the first is promoted while the second is multiplied. Nothing is under way at
      // the loop's end, or the compiler would serialize the products.
      float w0 = scale_of(begin), w1 = scale_of(begin + 1);
      int at = start;
      for (; at + 1 < seq; at += 2) {
        const float u0 = w0, u1 = w1;
        w0 = scale_of(begin + at - start + 2), w1 = scale_of(begin + at - start + 3);
        multiply(sum[0], at);
        multiply(sum[1], at + 1);
        wgmma_wait<1>();
        promote(sum[0], at, u0);
        wgmma_wait<0>();
        promote(sum[1], at + 1, u1);
      }
      if (at < seq) {
        multiply(sum[0], at);
        wgmma_wait<0>();
        promote(sum[0], at, w0);
      }
      if (a.cluster == 1) store_tile<Memory, TOKENS>(a, m, tile, acc);
      else publish_sums<Memory, 1, TOKENS>(m, acc);
    }
  }
  if (a.cluster > 1) {
    decode::cluster_arrive();
    decode::cluster_wait();
    sum_blocks<Memory, TOKENS>(a, m, locate<Memory, TOKENS>(a, first), rank, thread, blockDim.x);
    decode::cluster_arrive();  // no block ends while another reads its memory
    decode::cluster_wait();
  }
}

}  // namespace linear
