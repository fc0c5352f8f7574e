// MLA decode attention over an e4m3 cache with queries in e4m3 too, by a plan, of 16 heads and more (mla_fp8_eight.cuh:
// of 8): in shared memory nothing of the cache is converted. Queries are rounded, or the sum of two terms, which holds
// bfloat16's bits (mla_fp8_memory.cuh). A block takes all heads of one request over one item, 64 cache rows a step. The
// first warpgroup computes the scores and their online softmax in base 2, asks for the next rows' scores while it
// weighs these, and leaves the weights in shared memory in float16, heads along rows. The second and third compute 256
// columns of the values each, transposed: columns lie along the 64 rows of the matrix instruction and heads along its
// columns. The cache comes to the registers by a transposing ldmatrix, a byte permutation and two conversions to
// float16 for each four of its values, so that the tensor cores add up in float32 over all steps: over e4m3 they keep
// fewer bits. One warp of the fourth copies.
#pragma once
#include "mla_fp8_scores.cuh"
#include "mla_fp8_values.cuh"

namespace mla {

// A step's 64 rows, from `row` on, `n` steps of the block before it; by one thread.
template <class M>
__device__ __forceinline__ void copy_tile(M& m, const CUtensorMap* latent, const CUtensorMap* rope, int row, int n) {
  const int stage = n % M::kDepth;
  mbar_wait(&m.empty[stage], (n / M::kDepth & 1) ^ 1);
  mbar_arrive_expect_tx(&m.full[stage], kTile);
  for (int box = 0; box < 4; ++box)
    tma_load_2d(smem_u32(m.stage[stage] + box * kWideBox), latent, &m.full[stage], box * 128, row, kEvictFirst);
  tma_load_2d(smem_u32(m.stage[stage] + kRope), rope, &m.full[stage], kLatent, row, kEvictFirst);
}

// Steps `first` to `end` of an item, `before` of the block before its own; by one warp.
template <class M>
__device__ __forceinline__ void copy_tiles(M& m, const Arguments& a, const CUtensorMap* latent, const CUtensorMap* rope,
                                           const PlannedItem& item, int first, int end, int before) {
  const int lane = threadIdx.x % 32;
  const Part part(item);
  int page = 0;
  for (int i = first; i < end; ++i) {
    if (i == first || i % 32 == 0) page = page_of(a, part, item.request, i / 32 * 32 + lane);
    const int row = int(row_of(a, part, item.request, __shfl_sync(~0u, page, i % 32), i));
    if (lane == 0) copy_tile(m, latent, rope, row, before + i);
    __syncwarp();
  }
}

// The block's items, whose first steps are on their way; by one warp.
template <class M>
__device__ __forceinline__ void copy_tiles(M& m, const Arguments& a, const CUtensorMap* latent, const CUtensorMap* rope,
                                           const Items& items) {
  for (int number = items.begin, n = 0; number < items.end; ++number) {
    const PlannedItem item = item_of(a, number);
    copy_tiles(m, a, latent, rope, item, n ? 0 : items.settled, item.end - item.begin, n);
    n += item.end - item.begin;
  }
}

// How a block begins: its items and its barriers. The plan is there as a whole before any launch behind it starts.
template <class M>
__device__ __forceinline__ Items begin_fp8(M& m, const Arguments& a, const CUtensorMap* latent,
                                           const CUtensorMap* rope) {
  const int* firsts = reinterpret_cast<const int*>(first_items_of(a.plan, a.batch)) + blockIdx.x;
  const Items items = {__ldcg(firsts), __ldcg(firsts + 1), 0};
  if (threadIdx.x == 0) {
    prefetch_tensormap(latent);
    prefetch_tensormap(rope);
    for (int stage = 0; stage < M::kDepth; ++stage) mbar_init(&m.full[stage], 1), mbar_init(&m.empty[stage], 12);
    for (int i = 0; i < 2; ++i) mbar_init(&m.weights_full[i], 4), mbar_init(&m.weights_empty[i], 8);
    fence_mbar_init();
  }
  __syncthreads();
  return items;
}

// Of a thread, as the launch gives them.
constexpr int kLaunched = 128;
template <int REGISTERS>
__device__ __forceinline__ void set_registers() {
  if constexpr (REGISTERS < kLaunched) reg_dealloc<REGISTERS>();
  else reg_alloc<REGISTERS>();
}

template <int HEADS, int TERMS>
__global__ void __launch_bounds__(kFp8Threads, 1)
    attend_fp8(const __grid_constant__ CUtensorMap latent, const __grid_constant__ CUtensorMap rope,
               const __nv_bfloat16* query, const Arguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  using Held = Fp8Memory<HEADS, TERMS>;
  Held& m = *reinterpret_cast<Held*>(raw);
  static_assert(kScoreRegisters<HEADS> + 2 * kValueRegisters<HEADS> + kCopyRegisters <= 4 * kLaunched,
                "setmaxnreg would not return");
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  Items items = begin_fp8(m, a, &latent, &rope);
  const bool copies = threadIdx.x / 32 == kTakers;
  if (copies && items.begin < items.end) {
    const PlannedItem item = item_of(a, items.begin);
    items.settled = settled_steps(a, Part(item), item.request, Held::kDepth);
    copy_tiles(m, a, &latent, &rope, item, 0, items.settled, 0);
  }
  pdl_wait();
  pdl_launch();
  clear_empty(a);
  if (items.begin >= items.end) return;
  if (role == 3) {
    set_registers<kCopyRegisters>();
    if (copies) copy_tiles(m, a, &latent, &rope, items);
  } else if (role == 0) {
    set_registers<kScoreRegisters<HEADS>>();
    score_items(m, a, query, items);
  } else {
    set_registers<kValueRegisters<HEADS>>();
    value_items(m, a, query, items, role - 1);
  }
}

}  // namespace mla
