// MLA decode attention of 32 and 64 heads (fewer: mla_few_heads.cuh): a block takes all heads of one request over one
// part of its context, 64 cache rows a step. One warp copies: nine boxes of 64 columns a step through the tensor memory
// accelerator; of an e4m3 cache, four warps convert. The first warpgroup computes the scores, their online softmax in
// base 2 and the left 256 columns of the values; the second takes the weights from shared memory, in the first one's
// register order, and computes the right 256 columns. Keys and values are the same bytes: K-major for the scores,
// MN-major for the values.
#include "mla_few_heads.cuh"
#include "mla_merge_planned.cuh"
#include "mla_store.cuh"

namespace mla {

// Two warpgroups compute, and one copies or converts: registers are handed from these to the others.
constexpr int kThreads = kConsumers + 128;
// Registers of a thread that computes, and of one that copies; one that follows a plan needs a few more.
template <bool FP8_CACHE, bool PLANNED>
constexpr int kConsumerRegisters = FP8_CACHE ? 192
                                   : PLANNED ? 232
                                             : 240;
template <bool FP8_CACHE, bool PLANNED>
constexpr int kCopierRegisters = 504 - 2 * kConsumerRegisters<FP8_CACHE, PLANNED>;
// Named barriers: weights written, weights read, totals of every other part written (3 and 4), one warpgroup alone (5
// and 6). The first warpgroup comes upon a part's totals again two parts later, by when it has waited at kFree for
// the second one to be past them.
constexpr int kReady = 1, kFree = 2, kTotals = 3, kAlone = 5;

// acc = acc * shrink + weights V over 256 columns.
template <bool FP8_CACHE>
__device__ __forceinline__ void add_values(float (&acc)[2][64], const uint32_t (&weights)[4][4], const uint8_t* stage,
                                           int half, float shrink0, float shrink1) {
  if (!__all_sync(~0u, shrink0 == 1.f && shrink1 == 1.f)) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[n][i] *= i % 4 < 2 ? shrink0 : shrink1;
  }
  const uint32_t base = smem_u32(stage) + half * kHalfBytes;
  fence_regs(acc[0]);
  fence_regs(acc[1]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      Instructions<FP8_CACHE>::values(acc[n], weights[k],
                                      descriptor(base + n * 2 * kBoxBytes + k * 2 * kEight, kBoxBytes, kEight));
  wgmma_commit();
  wgmma_wait<0>();
  fence_regs(acc[0]);
  fence_regs(acc[1]);
}

// What the first warpgroup keeps of a part: its half of the values, and of each of its two rows the maximum and the
// sum.
struct LeftState {
  float acc[2][64] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
};

// By the first warpgroup, which alone reads the queries.
template <bool FP8_CACHE>
__device__ __forceinline__ void await_query(Memory& m, const Arguments& a, int phase) {
  mbar_wait(&m.query_full[0], phase);
  if (FP8_CACHE) shrink_query<Memory::kQueryBox, 128>(m.query[0], a.heads, threadIdx.x, kAlone);
}

// One step of 64 cache rows, of which `rows` are there; `n` steps of the block come before it. `last` of its part.
template <bool FP8_CACHE>
__device__ __forceinline__ void left_step(Memory& m, const Arguments& a, LeftState& state, int n, int rows, bool last) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
  const int stage = n % kStages, phase = n / kStages & 1;
  float (&top)[2] = state.top;
  float score[32];
  const uint32_t query = smem_u32(m.query[0]), keys = smem_u32(m.stage[stage]);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    if (box % 4 == 0) {
      mbar_wait(&m.full[stage][box / 4], phase);
      wgmma_fence();
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      Instructions<FP8_CACHE>::scores(score, descriptor(query + box * Memory::kQueryBox + k * 32, 16, kEight),
                                      descriptor(keys + box * kBoxBytes + k * 32, 16, kEight), box + k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_regs(score);
  if (lane == 0) mbar_arrive(&m.empty[stage][2]);
  if (lane == 0 && last) mbar_arrive(&m.query_empty[0]);

  float shrink[2], best[2] = {top[0], top[1]}, sum[2] = {};
#pragma unroll
  for (int j = 0; j < 32; ++j) score[j] *= a.scale;
  if (rows < kRows + a.tokens - 1) {
    const int heads = a.heads / a.tokens, first = rows - (a.tokens - 1);
    const int seen[2] = {first + row / heads, first + (row + 8) / heads};
#pragma unroll
    for (int j = 0; j < 32; ++j)
      if (j / 4 * 8 + lane % 4 * 2 + j % 2 >= seen[j % 4 / 2]) score[j] = -INFINITY;
  }
#pragma unroll
  for (int j = 0; j < 32; ++j) best[j % 4 / 2] = fmaxf(best[j % 4 / 2], score[j]);
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) best[lower] = fmaxf(best[lower], __shfl_xor_sync(~0u, best[lower], mask));
    // Nothing seen yet: a token that came before others may find its last rows in another part.
    const float base = best[lower] == -INFINITY ? 0.f : best[lower];
    shrink[lower] = exp2_approximate(top[lower] - base);
    top[lower] = best[lower], best[lower] = base;
  }
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    score[j] = exp2_approximate(score[j] - best[j % 4 / 2]);
    sum[j % 4 / 2] += score[j];
  }
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) state.total[lower] = state.total[lower] * shrink[lower] + sum[lower];
  uint32_t weights[4][4];
#pragma unroll
  for (int j = 0; j < 16; ++j) weights[j / 4][j % 4] = pack<FP8_CACHE>(score[2 * j], score[2 * j + 1]);
  if (n > 0) named_sync(kFree, kConsumers);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    reinterpret_cast<uint4*>(m.weights)[k * 128 + thread] =
        make_uint4(weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
  if (lane % 4 == 0) {
    m.shrink[row] = shrink[0];
    m.shrink[row + 8] = shrink[1];
  }
  named_arrive(kReady, kConsumers);
  if (rows < kRows) clear_rows(m.stage[stage], 0, rows, kAlone);
  add_values<FP8_CACHE>(state.acc, weights, m.stage[stage], 0, shrink[0], shrink[1]);
  if (lane == 0) mbar_arrive(&m.empty[stage][0]);
}

// Hands the sums of the part's rows to the second warpgroup and stores the left half.
template <bool PLANNED>
__device__ __forceinline__ void left_store(Memory& m, const Arguments& a, LeftState& state, const Work<PLANNED>& work,
                                           int parity) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) state.total[lower] += __shfl_xor_sync(~0u, state.total[lower], mask);
    if (lane % 4 == 0) {
      m.top[parity][row + lower * 8] = state.top[lower];
      m.total[parity][row + lower * 8] = state.total[lower];
    }
  }
  named_arrive(kTotals + parity, kConsumers);
  store(a, state.acc, work, 0, state.top, state.total);
}

// The second warpgroup's step; `last` of the block.
template <bool FP8_CACHE>
__device__ __forceinline__ void right_step(Memory& m, float (&acc)[2][64], int n, int rows, bool last) {
  const int thread = threadIdx.x - 128, warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
  const int stage = n % kStages, phase = n / kStages & 1;
  mbar_wait(&m.full[stage][1], phase);
  if (rows < kRows) clear_rows(m.stage[stage], 1, rows, kAlone + 1);
  uint32_t weights[4][4];
  named_sync(kReady, kConsumers);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint4 four = reinterpret_cast<const uint4*>(m.weights)[k * 128 + thread];
    weights[k][0] = four.x, weights[k][1] = four.y, weights[k][2] = four.z, weights[k][3] = four.w;
  }
  const float shrink0 = m.shrink[row], shrink1 = m.shrink[row + 8];
  if (!last) named_arrive(kFree, kConsumers);  // racecheck reports the reads above, see kHanded
  add_values<FP8_CACHE>(acc, weights, m.stage[stage], 1, shrink0, shrink1);
  if (lane == 0) mbar_arrive(&m.empty[stage][1]);
}

template <bool PLANNED>
__device__ __forceinline__ void right_store(Memory& m, const Arguments& a, const float (&acc)[2][64],
                                            const Work<PLANNED>& work, int parity) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  named_sync(kTotals + parity, kConsumers);
  const float top[2] = {m.top[parity][row], m.top[parity][row + 8]};
  const float total[2] = {m.total[parity][row], m.total[parity][row + 8]};
  store(a, acc, work, 1, top, total);
}

template <bool FP8_CACHE>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap cache, const Arguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Memory& m = *reinterpret_cast<Memory*>(raw);
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const bool copies = role >= 2 && (FP8_CACHE || threadIdx.x < kConsumers + 32);
  int page = 0;
  const Work<false> work;
  const Part part = begin<FP8_CACHE>(m, a, &query, &cache, work, copies, &page);
  if (part.count <= 0) return store_nothing(a, work);
  if (role >= 2) {
    reg_dealloc<kCopierRegisters<FP8_CACHE, false>>();
    if (FP8_CACHE) convert_rows<1>(m, a, part, work.request, page);
    else if (copies) copy_rows(m, a, &cache, part, work.request, page);
    return;
  }
  reg_alloc<kConsumerRegisters<FP8_CACHE, false>>();
  const int rows = part.length - part.first * kRows;
  if (role == 0) {
    LeftState state;
    await_query<FP8_CACHE>(m, a, 0);
    for (int i = 0; i < part.count; ++i) left_step<FP8_CACHE>(m, a, state, i, rows - i * kRows, false);
    left_store(m, a, state, work, 0);
  } else {
    float acc[2][64] = {};
    for (int i = 0; i < part.count; ++i) right_step<FP8_CACHE>(m, acc, i, rows - i * kRows, i + 1 == part.count);
    right_store(m, a, acc, work, 0);
  }
}

// The same by a plan, item after item: while one is stored, the next one's rows arrive.
template <bool FP8_CACHE>
__global__ void __launch_bounds__(kThreads, 1)
    attend_planned(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap cache,
                   const Arguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Memory& m = *reinterpret_cast<Memory*>(raw);
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  int page = 0;
  const Items items = begin_planned<FP8_CACHE>(m, a, &query, &cache, &page);
  clear_empty(a);
  if (items.begin >= items.end) return;
  if (role >= 2) {
    reg_dealloc<kCopierRegisters<FP8_CACHE, true>>();
    if (FP8_CACHE) convert_items<1>(m, a, &query, items, page);
    else if (threadIdx.x < kConsumers + 32) copy_items(m, a, &query, &cache, items, page);
    return;
  }
  reg_alloc<kConsumerRegisters<FP8_CACHE, true>>();
  for (int number = items.begin, done = 0; number < items.end; ++number) {
    // Read again behind the steps: registers are short in between.
    const Part part(item_of(a, number));
    const int parity = number - items.begin & 1, count = part.count, rows = part.length - part.first * kRows;
    if (role == 0) {
      LeftState state;
      await_query<FP8_CACHE>(m, a, parity);
      for (int i = 0; i < count; ++i) left_step<FP8_CACHE>(m, a, state, done + i, rows - i * kRows, i + 1 == count);
      left_store(m, a, state, Work<true>(number, item_of(a, number)), parity);
    } else {
      float acc[2][64] = {};
      const int last = number + 1 == items.end ? count - 1 : count;
      for (int i = 0; i < count; ++i) right_step<FP8_CACHE>(m, acc, done + i, rows - i * kRows, i == last);
      right_store(m, a, acc, Work<true>(number, item_of(a, number)), parity);
    }
    done += count;
  }
}

}  // namespace mla
