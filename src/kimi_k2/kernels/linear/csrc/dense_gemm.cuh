// y = x W^T in bf16 with float32 sums, in an order that the number of tokens does not change: every value is one chain
// of matrix instructions over a part of the columns, 16 at a time, and the parts are added in their order. How many
// tokens share a tile changes the instruction's width alone.
//
// One thread feeds a ring of 64 columns of both operands through the copy engine; each of GROUPS warpgroups multiplies
// its 64 rows of W (the left operand) by the tile's tokens. The blocks of a cluster share a tile, each a part of the
// columns, and then sum it as block_gemm.cuh says.
#pragma once
#include "block_gemm.cuh"

namespace linear {

template <int GROUPS, int TOKENS, int STAGES>
struct DenseMemory {
  static constexpr int kRows = 64 * GROUPS, kSumPitch = kRows + 4;
  struct Ring {
    alignas(1024) unsigned char w[STAGES][kRows * 128];
    alignas(1024) unsigned char x[STAGES][TOKENS * 128];
  };
  union {
    Ring ring;
    alignas(1024) float sums[TOKENS][kSumPitch];
  };
  alignas(8) uint64_t full[STAGES], empty[STAGES];
};

template <class Memory, int TOKENS, int STAGES>
__device__ __forceinline__ void feed_dense(Memory& m, const CUtensorMap& weights, const CUtensorMap& tokens,
                                           const Tile tile, int begin, int end, bool once) {
  const uint64_t policy = once ? kEvictFirst : kEvictNormal;
  feed_tile<STAGES>(
      m, 0, end - begin,
      [&](int st, int i) {
        mbar_arrive_expect_tx(&m.full[st], (Memory::kRows + TOKENS) * 128);
        tma_load_2d(smem_u32(m.ring.w[st]), &weights, &m.full[st], (begin + i) * 64, tile.row, policy);
      },
      [&](int st, int i) {
        tma_load_2d(smem_u32(m.ring.x[st]), &tokens, &m.full[st], (begin + i) * 64, tile.token, kEvictNormal);
      });
}

template <int GROUPS, int TOKENS, int STAGES, bool WIDE>
__global__ void __launch_bounds__(Registers<GROUPS>::kThreads, Registers<GROUPS>::kBlocks)
    dense_gemm(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens,
               const GemmArguments a) {
  using Memory = DenseMemory<GROUPS, TOKENS, STAGES>;
  extern __shared__ __align__(1024) unsigned char raw[];
  Memory& m = *reinterpret_cast<Memory*>(raw);
  const int thread = threadIdx.x, lane = thread % 32, group = thread / 128 - 1;
  const int rank = blockIdx.x % a.cluster, blocks = a.columns / 64;
  const int begin = rank * blocks / a.cluster, end = (rank + 1) * blocks / a.cluster;
  const Tile tile = locate<Memory, TOKENS>(a, blockIdx.x / a.cluster);
  open_ring<GROUPS, STAGES>(m, weights, tokens);

  if (group < 0) {
    reg_dealloc<Registers<GROUPS>::kFeed>();
    if (thread == 0) feed_dense<Memory, TOKENS, STAGES>(m, weights, tokens, tile, begin, end, a.tokens <= TOKENS);
  } else {
    reg_alloc<Registers<GROUPS>::kMultiply>();
    float acc[TOKENS / 2];  // the first product overwrites it
    for (int i = 0; i < end - begin; ++i) {
      const int st = i % STAGES;
      mbar_wait(&m.full[st], (i / STAGES) & 1);
      const uint64_t left = desc_sw128(smem_u32(m.ring.w[st]) + group * 8192),
                     right = desc_sw128(smem_u32(m.ring.x[st]));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) WgmmaBf16<TOKENS>::go(acc, left + 2 * k, right + 2 * k, i + k > 0);
      wgmma_commit();
      wgmma_wait<1>();  // the block of columns before has been read
      if (i > 0 && lane == 0) mbar_arrive(&m.empty[(i - 1) % STAGES]);
    }
    wgmma_wait<0>();
    fence_regs(acc);
    publish_sums<Memory, GROUPS, TOKENS>(m, acc);
  }
  decode::cluster_arrive();
  decode::cluster_wait();
  sum_blocks<Memory, TOKENS, WIDE>(a, m, tile, rank, thread, blockDim.x);
  decode::cluster_arrive();  // no block ends while another reads its memory
  decode::cluster_wait();
}

}  // namespace linear
