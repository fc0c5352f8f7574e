// MLA decode attention over an e4m3 cache of 8 heads (mla_fp8.cuh has more): their sums are so few that to add them up
// in float32 step by step takes less time than to bring the values to float16. So weights come to e4m3 too, rounded or
// the sum of two terms, and values stay e4m3.
#pragma once
#include "mla_fp8.cuh"

namespace mla {

template <int TERMS>
struct alignas(1024) EightMemory {
  static constexpr int kHeads = 8, kTerms = TERMS, kWeights = kHeads * kRows, kDepth = TERMS > 1 ? 3 : 4;
  uint8_t query[TERMS][kTile], stage[kDepth][kTile], weights[2][TERMS][kWeights];
  float scale[kRows], shrink[2][kRows], inverse[2][kRows];
  uint64_t full[kDepth], empty[kDepth], weights_full[2], weights_empty[2];
};

// By the warpgroup that scores: a request's queries, four heads of a warp at once, the next four on their way.
template <class M>
__device__ __forceinline__ void take_eight_queries(M& m, const Arguments& a, const __nv_bfloat16* query, int request) {
  constexpr int kRounds = M::kHeads < 16 ? M::kHeads / 4 : 4;
  const int head = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 8;
  named_sync(kScorers, 128);  // the last one is no longer read
  if (threadIdx.x / 32 * 16 < M::kHeads) {
    const uint4* from =
        reinterpret_cast<const uint4*>(query + (int64_t(request) * M::kHeads + head) * kRow) + threadIdx.x % 8;
    uint4 raw[9], next[9];
#pragma unroll
    for (int j = 0; j < 9; ++j) next[j] = __ldcg(from + j * 8);
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
      for (int j = 0; j < 9; ++j) raw[j] = next[j];
      if (round + 1 < kRounds)
#pragma unroll
        for (int j = 0; j < 9; ++j) next[j] = __ldcg(from + (round + 1) * 4 * (kRow / 8) + j * 8);
      round_query(m, raw, head + round * 4, a.scale);
    }
  }
  fence_proxy_async();
  named_sync(kScorers, 128);
}

// Asks the tensor cores for the scores of 64 cache rows; `n` steps of the block come before it. Small terms first.
template <class M>
__device__ __forceinline__ void ask_eight(M& m, float (&score)[32], int n) {
  mbar_wait(&m.full[n % M::kDepth], n / M::kDepth & 1);
  const uint32_t queries = lower_half(m.query), keys = lower_half(m.stage[n % M::kDepth]);
  fence_regs(score);
  wgmma_fence();
#pragma unroll
  for (int term = M::kTerms - 1; term >= 0; --term) {
    const uint32_t query = queries + term * (kTile / 16);
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const int at = (k / 4 * kWideBox + k % 4 * 32) / 16;
      scores_128(score, query + at, keys + at, k > 0 || term < M::kTerms - 1);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) scores_64(score, query + kRope / 16 + k * 2, keys + kRope / 16 + k * 2, 1);
  }
  wgmma_commit();
}

// The weights of scores, of whose rows `rows` are there, `to` the second warpgroups.
template <class M>
__device__ __forceinline__ void weigh_eight(M& m, const Arguments& a, ScoreState& state, float (&score)[32], int n,
                                            int rows, bool last, int64_t item, bool alone) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane / 4, pair = lane % 4, to = n % 2;
  const float scale[2] = {m.scale[row], m.scale[row + 8]};
  hide_rows<M>(a, score, row, pair, rows);
  float shrink[2], base[2], sum[2] = {};
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    float best = score[2 * lower];
#pragma unroll
    for (int j = 0; j < 16; ++j) best = fmaxf(best, score[j / 2 * 4 + 2 * lower + j % 2]);
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, mask));
    best = fmaxf(state.top[lower], best * scale[lower]);
    // Nothing seen yet: a token that came before others may find its last rows in another part.
    base[lower] = best == -INFINITY ? 0.f : best;
    shrink[lower] = exp2_approximate(state.top[lower] - base[lower]);
    state.top[lower] = best, base[lower] -= kWeightLog;
  }
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    score[j] = exp2_approximate(score[j] * scale[j % 4 / 2] - base[j % 4 / 2]);
    sum[j % 4 / 2] += score[j];
  }
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) state.total[lower] = state.total[lower] * shrink[lower] + sum[lower];

  mbar_wait(&m.weights_empty[to], (n / 2 & 1) ^ 1);
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int head = row + 8 * lower;
    if (head >= M::kHeads) continue;
    // In the order of `take_values`: of 16 rows this thread's pair of the first 8, then that of the last 8.
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const float* s = score + 8 * four + 2 * lower;
      uint8_t* const place = m.weights[to][0] + head * kRows + (four ^ (head / 2 % 4)) * 16 + pair * 4;
      const uint32_t left = to_e4m3(s[0], s[1]), right = to_e4m3(s[4], s[5]);
      *reinterpret_cast<uint32_t*>(place) = left | right << 16;
      if (M::kTerms > 1)
        *reinterpret_cast<uint32_t*>(place + M::kWeights) = rest_of(left, s[0], s[1]) | rest_of(right, s[4], s[5])
                                                                                            << 16;
    }
    if (pair == 0) m.shrink[to][head] = shrink[lower];
  }
  if (last) finish_scores(m, a, state, to, item, alone);
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) mbar_arrive(&m.weights_full[to]);
}

template <class M>
__device__ __forceinline__ void score_eight(M& m, const Arguments& a, const __nv_bfloat16* query, const Items& items) {
  for (int number = items.begin, n = 0; number < items.end; ++number) {
    const PlannedItem item = item_of(a, number);
    const Part part(item);
    const bool alone = Work<true>(number, item).alone(a);
    const int rows = part.length - part.first * kRows, last = part.count - 1;
    take_eight_queries(m, a, query, item.request);
    ScoreState state;
    float score[32], held[32];
    ask_eight(m, score, n);
    for (int i = 0; i < last; ++i) {
      await_scores(m, score, n + i);
#pragma unroll
      for (int j = 0; j < 32; ++j) held[j] = score[j];
      fence_regs(held);
      ask_eight(m, score, n + i + 1);
      weigh_eight(m, a, state, held, n + i, rows - i * kRows, false, number, alone);
    }
    await_scores(m, score, n + last);
    weigh_eight(m, a, state, score, n + last, rows - last * kRows, true, number, alone);
    n += part.count;
  }
}

// d (+)= A[64, 32] B[8, 32]^T in e4m3, A in registers, rows of B of 64 bytes; accumulate 0 overwrites d.
__device__ __forceinline__ void values_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b, int accumulate) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %9, 0;\nmov.b64 b, {%8, " MLA_ROWS_64
               "};\nwgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {" PTX_S4
               "}, {%4, %5, %6, %7}, b, p, 1, 1;\n}\n"
               : PTX_D4(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));
}

// The fragments of a tile of 64 columns, of which this warp has 16, of all 64 rows; those from `rows` on become zeros,
// as zero times NaN is NaN. A matrix of ldmatrix is 8 rows of 8 pairs of columns: a lane gets a pair of columns of two
// rows, and the byte permutations make of two such one column of four rows. Row g of a fragment is the first column of
// pair g, row g + 8 the second one.
__device__ __forceinline__ void take_e4m3(uint32_t (&left)[2][4], uint32_t stage, int half, int tile, int rows) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t at = stage + (half * 2 + tile / 2) * kWideBox + lane * 128 + ((tile % 2 * 4 + warp) ^ (lane % 8)) * 16;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t raw[4];
    ldmatrix_x4_trans(raw, at + k * 32 * 128);
    if (rows < kRows) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = k * 32 + i * 8 + lane % 4 * 2;
        if (first >= rows) raw[i] &= 0xffff0000u;
        if (first + 1 >= rows) raw[i] &= 0x0000ffffu;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      left[k][2 * i] = __byte_perm(raw[2 * i], raw[2 * i + 1], 0x6420);
      left[k][2 * i + 1] = __byte_perm(raw[2 * i], raw[2 * i + 1], 0x7531);
    }
  }
}

template <class M>
__device__ __forceinline__ void value_eight(M& m, const Arguments& a, const Items& items, int half) {
  const int lane = threadIdx.x % 32;
  for (int number = items.begin, n = 0; number < items.end; ++number) {
    // Read again behind the steps: registers are short in between.
    const Part part(item_of(a, number));
    const int count = part.count, rows = part.length - part.first * kRows;
    float acc[4][4] = {};
    for (int i = 0; i < count; ++i, ++n) {
      const int stage = n % M::kDepth, from = n % 2;
      mbar_wait(&m.full[stage], n / M::kDepth & 1);
      const uint32_t values = smem_u32(m.stage[stage]), weights = lower_half(m.weights[from]);
      uint32_t left[2][2][4];
      float sum[4];
      take_e4m3(left[0], values, half, 0, rows - i * kRows);
      mbar_wait(&m.weights_full[from], n / 2 & 1);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        fence_regs(sum);
        wgmma_fence();
        // Small terms first.
#pragma unroll
        for (int term = M::kTerms - 1; term >= 0; --term)
#pragma unroll
          for (int k = 0; k < 2; ++k)
            values_e4m3(sum, left[tile % 2][k], weights + term * (M::kWeights / 16) + k * 2,
                        k > 0 || term < M::kTerms - 1);
        wgmma_commit();
        if (tile < 3) take_e4m3(left[(tile + 1) % 2], values, half, tile + 1, rows - i * kRows);
        // The last fragments are in registers: their values have been asked for.
        if (tile == 3 && lane == 0) mbar_arrive(&m.empty[stage]);
        // In float32: the tensor cores' own sums over e4m3 keep fewer bits.
        wgmma_wait<0>();
        fence_regs(sum);
        const float2 two = *reinterpret_cast<const float2*>(m.shrink[from] + threadIdx.x % 4 * 2);
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[tile][j] = fmaf(acc[tile][j], j % 2 ? two.y : two.x, sum[j]);
        fence_regs(acc[tile]);  // what shrinks has been read before the weights' place is handed back
      }
      if (i + 1 == count) {
        const PlannedItem item = item_of(a, number);
        store_values<8>(a, acc, m.inverse[from], half, item.request, number, Work<true>(number, item).alone(a));
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(&m.weights_empty[from]);
    }
  }
}

// By one warp.
template <class M>
__device__ __forceinline__ void copy_eight(M& m, const Arguments& a, const CUtensorMap* latent, const CUtensorMap* rope,
                                           const Items& items) {
  const int lane = threadIdx.x % 32;
  for (int number = items.begin, n = 0; number < items.end; ++number) {
    const PlannedItem item = item_of(a, number);
    const Part part(item);
    int page = 0;
    for (int i = 0; i < part.count; ++i, ++n) {
      if (i % 32 == 0) page = page_of(a, part, item.request, i + lane);
      const int row = int(row_of(a, part, item.request, __shfl_sync(~0u, page, i % 32), i)), stage = n % M::kDepth;
      if (lane == 0) {
        mbar_wait(&m.empty[stage], (n / M::kDepth & 1) ^ 1);
        mbar_arrive_expect_tx(&m.full[stage], kTile);
        for (int box = 0; box < 4; ++box)
          tma_load_2d(smem_u32(m.stage[stage] + box * kWideBox), latent, &m.full[stage], box * 128, row, kEvictFirst);
        tma_load_2d(smem_u32(m.stage[stage] + kRope), rope, &m.full[stage], kLatent, row, kEvictFirst);
      }
      __syncwarp();
    }
  }
}

template <int TERMS>
__global__ void __launch_bounds__(kFp8Threads, 1)
    attend_fp8_eight(const __grid_constant__ CUtensorMap latent, const __grid_constant__ CUtensorMap rope,
                     const __nv_bfloat16* query, const Arguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  using Held = EightMemory<TERMS>;
  Held& m = *reinterpret_cast<Held*>(raw);
  static_assert(kScoreRegisters<8> + 2 * kValueRegisters<8> + kCopyRegisters <= 4 * kLaunched,
                "setmaxnreg would not return");
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const Items items = begin_fp8(m, a, &latent, &rope);
  pdl_wait();
  pdl_launch();
  clear_empty(a);
  if (items.begin >= items.end) return;
  if (role == 3) {
    set_registers<kCopyRegisters>();
    if (threadIdx.x < 3 * 128 + 32) copy_eight(m, a, &latent, &rope, items);
  } else if (role == 0) {
    set_registers<kScoreRegisters<8>>();
    score_eight(m, a, query, items);
  } else {
    set_registers<kValueRegisters<8>>();
    value_eight(m, a, items, role - 1);
  }
}

}  // namespace mla
