// y = x W^T on the tensor cores: x in e4m3 with a float32 scale a token and 128 columns, W in e4m3 with one a 128x128
// block, sums in float32, y in bf16. x may be the sum of two TERMS, the second of them what rounding the first has
// left: they hold bf16's bits, and their products have one sum.
//
// A tile is GROUPS times 64 rows of W by TOKENS tokens. One thread feeds a ring of 128 columns of both through the copy
// engine; each of GROUPS warpgroups multiplies its 64 rows (the left operand) by the tokens and adds every block of 128
// columns, scaled, to its sums. W does not depend on the launch before this one: the first requests for it go out
// before that one has ended.
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

template <int GROUPS, int TOKENS, int TERMS, int STAGES>
struct GemmMemory {
  static constexpr int kRows = 64 * GROUPS, kPart = TOKENS > 128 ? TOKENS / 2 : TOKENS, kParts = TOKENS / kPart;
  // Where a block of columns takes little time, the latency of its products shows: two are under way.
  static constexpr int kBuffers = TOKENS <= 64 ? 2 : 1;
  static constexpr int kStored = TOKENS <= 64 ? TOKENS : TOKENS % 64 ? TOKENS / 2 : 64;  // tokens staged at a time
  static_assert(TOKENS % kStored == 0 && kStored % 16 == 0, "whole stores of two matrices of 8 tokens");
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
  alignas(128) unsigned char staged[GROUPS][kStored * kStagedPitch];
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

// One thread: every tile's blocks of columns into the ring.
template <class Memory, int TOKENS, int TERMS, int STAGES>
__device__ __forceinline__ void feed(const GemmArguments& a, Memory& m, const CUtensorMap& weights,
                                     const CUtensorMap& tokens, int first, int step, int tiles, int begin, int end) {
  const uint64_t policy = a.tokens <= TOKENS ? kEvictFirst : kEvictNormal;
  auto request_weights = [&](int st, int row, int kb) {
    mbar_arrive_expect_tx(&m.full[st], Memory::kRows * 128 + TERMS * TOKENS * 128 + TOKENS * 4);
    tma_load_2d(smem_u32(m.ring.w[st]), &weights, &m.full[st], kb * 128, row, policy);
  };
  auto request_tokens = [&](int st, int token, int kb) {
#pragma unroll
    for (int i = 0; i < TERMS; ++i)  // a ragged last tile ends in the next term's first tokens, which nobody stores
      tma_load_2d(smem_u32(m.ring.x[st][i]), &tokens, &m.full[st], kb * 128, i * a.tokens + token, kEvictNormal);
    bulk_load(m.scale[st], a.token_scale + (size_t)kb * a.token_stride + token, TOKENS * 4, &m.full[st], kEvictNormal);
  };
  int seq = 0;
  for (int t = first; t < tiles; t += step) {
    const Tile tile = locate<Memory, TOKENS>(a, t);
    int kb = begin;
    if (seq == 0) {
      const int ahead = min(STAGES, end - begin);
      for (int i = 0; i < ahead; ++i) request_weights(i, tile.row, begin + i);
      pdl_wait();
      for (int i = 0; i < ahead; ++i) request_tokens(i, tile.token, begin + i);
      seq = ahead;
      kb += ahead;
    }
    for (; kb < end; ++kb, ++seq) {
      const int st = seq % STAGES;
      if (seq >= STAGES) mbar_wait(&m.empty[st], ((seq / STAGES) - 1) & 1);
      request_weights(st, tile.row, kb);
      request_tokens(st, tile.token, kb);
    }
  }
}

// A lane has rows 16 w + g and 8 further of tokens 8 j + 2 q, 8 j + 2 q + 1: acc[4 j], [4 j + 1]; [4 j + 2], [4 j + 3].
// A tile without partners: through shared memory, so that each token's 64 rows leave as one line.
template <class Memory, int TOKENS>
__device__ __forceinline__ void store_tile(const GemmArguments& a, Memory& m, const Tile tile,
                                           const float (&acc)[TOKENS / 2]) {
  constexpr int kCols = Memory::kStored;
  const int thread = threadIdx.x % 128, group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  unsigned char* mine = m.staged[group];
  const uint32_t put =
      smem_u32(mine) + ((lane >> 4) * 8 + (lane & 7)) * kStagedPitch + thread / 32 * 32 + ((lane >> 3) & 1) * 16;
  const int row = tile.row + group * 64, tokens = a.tokens - tile.token;
#pragma unroll
  for (int c = 0; c < TOKENS; c += kCols) {
#pragma unroll
    for (int j = c / 8; j < (c + kCols) / 8; j += 2)
      stmatrix_x4_trans(put + (j - c / 8) * 8 * kStagedPitch, pack_bf16(acc[4 * j], acc[4 * j + 1]),
                        pack_bf16(acc[4 * j + 2], acc[4 * j + 3]), pack_bf16(acc[4 * j + 4], acc[4 * j + 5]),
                        pack_bf16(acc[4 * j + 6], acc[4 * j + 7]));
    named_sync(2 + group, 128);
    for (int i = thread; i < min(kCols, tokens - c) * 8; i += 128) {
      const int token = i >> 3, part = i & 7;
      if (row + part * 8 < a.rows)
        *reinterpret_cast<uint4*>(a.out + (size_t)(tile.token + c + token) * a.rows + row + part * 8) =
            *reinterpret_cast<const uint4*>(mine + token * kStagedPitch + part * 16);
    }
    named_sync(2 + group, 128);
  }
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

template <int GROUPS, int TOKENS, int TERMS, int STAGES>
__global__ void __launch_bounds__(Registers<GROUPS>::kThreads, Registers<GROUPS>::kBlocks)
    block_gemm(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens,
               const GemmArguments a) {
  using Memory = GemmMemory<GROUPS, TOKENS, TERMS, STAGES>;
  constexpr int kPart = Memory::kPart, kParts = Memory::kParts, kBuffers = Memory::kBuffers;
  extern __shared__ __align__(1024) unsigned char raw[];
  Memory& m = *reinterpret_cast<Memory*>(raw);
  const int thread = threadIdx.x, lane = thread % 32, group = thread / 128 - 1;
  const int rank = blockIdx.x % a.cluster, blocks = a.columns / 128;
  const int begin = rank * blocks / a.cluster, end = (rank + 1) * blocks / a.cluster;
  const int first = blockIdx.x / a.cluster, step = gridDim.x / a.cluster;
  const int tiles = ((a.rows + Memory::kRows - 1) / Memory::kRows) * ((a.tokens + TOKENS - 1) / TOKENS);
  open_ring<GROUPS, STAGES>(m, weights, tokens);

  if (group < 0) {
    reg_dealloc<Registers<GROUPS>::kFeed>();
    if (thread == 0) feed<Memory, TOKENS, TERMS, STAGES>(a, m, weights, tokens, first, step, tiles, begin, end);
  } else {
    reg_alloc<Registers<GROUPS>::kMultiply>();
    int seq = 0;
    for (int t = first; t < tiles; t += step) {
      const Tile tile = locate<Memory, TOKENS>(a, t);
      // The last group of a tile may lie past the last row.
      const int block = min((tile.row + group * 64) / 128, (a.rows - 1) / 128);
      const float* scales = a.weight_scale + (size_t)block * blocks;
      float acc[TOKENS / 2];
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) acc[i] = 0.f;
      float sum[kBuffers][kPart / 2];
      auto multiply = [&](float (&to)[kPart / 2], int at, int p) {
        const int st = at % STAGES;
        if (p == 0) mbar_wait(&m.full[st], (at / STAGES) & 1);
        const uint64_t left = desc_sw128(smem_u32(m.ring.w[st]) + group * 8192);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TERMS; ++i) {
          const uint64_t right = desc_sw128(smem_u32(m.ring.x[st][i])) + p * (kPart * 8);
#pragma unroll
          for (int k = 0; k < 4; ++k) WgmmaE4m3<kPart>::go(to, left + 2 * k, right + 2 * k, i + k > 0);
        }
        wgmma_commit();
      };
      auto promote = [&](float (&from)[kPart / 2], int at, int p, float w) {
        const float* scale = m.scale[at % STAGES] + 2 * (lane & 3) + p * kPart;
        fence_regs(from);
        uint32_t read = 0;
#pragma unroll
        for (int j = 0; j < kPart / 8; ++j) {
          const float2 c = *reinterpret_cast<const float2*>(scale + 8 * j);
          read |= __float_as_uint(c.x);
          const float c0 = c.x * w, c1 = c.y * w;
          float* to = acc + p * (kPart / 2) + 4 * j;
          to[0] += from[4 * j] * c0;
          to[1] += from[4 * j + 1] * c1;
          to[2] += from[4 * j + 2] * c0;
          to[3] += from[4 * j + 3] * c1;
        }
        if (p == kParts - 1) {
          __syncwarp();
          if (lane == 0) mbar_arrive_behind(&m.empty[at % STAGES], read);
        }
      };
      auto scale_of = [&](int kb) { return __ldg(scales + min(kb, end - 1)); };
      const int start = seq;
      seq += end - begin;
      if constexpr (kBuffers == 2) {
        // Two blocks of columns at once: the first is promoted while the second is multiplied. Nothing is under way
        // at the loop's end, or the compiler would serialize the products.
        float w0 = scale_of(begin), w1 = scale_of(begin + 1);
        int at = start;
        for (; at + 1 < seq; at += 2) {
          const float u0 = w0, u1 = w1;
          w0 = scale_of(begin + at - start + 2), w1 = scale_of(begin + at - start + 3);
          multiply(sum[0], at, 0);
          multiply(sum[1], at + 1, 0);
          wgmma_wait<1>();
          promote(sum[0], at, 0, u0);
          wgmma_wait<0>();
          promote(sum[1], at + 1, 0, u1);
        }
        if (at < seq) {
          multiply(sum[0], at, 0);
          wgmma_wait<0>();
          promote(sum[0], at, 0, w0);
        }
      } else {
        float next = scale_of(begin);
        for (int at = start; at < seq; ++at) {
          const float w = next;
          next = scale_of(begin + at - start + 1);
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            multiply(sum[0], at, p);
            wgmma_wait<0>();
            promote(sum[0], at, p, w);
          }
        }
      }
      if (a.cluster == 1) store_tile<Memory, TOKENS>(a, m, tile, acc);
      else publish_sums<Memory, GROUPS, TOKENS>(m, acc);
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
