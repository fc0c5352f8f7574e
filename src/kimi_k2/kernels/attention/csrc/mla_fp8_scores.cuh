// MLA decode attention in e4m3 (mla_fp8.cuh): the warpgroup that rounds queries, computes scores and weighs them.
#pragma once
#include "mla_fp8_memory.cuh"

namespace mla {

// d (+)= A[64, 32] B[64, 32]^T in e4m3; accumulate 0 overwrites d.
#define MLA_SCORES(NAME, UPPER)                                                                                     \
  __device__ __forceinline__ void NAME(float (&d)[32], uint32_t a, uint32_t b, int accumulate) {                    \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, " UPPER               \
                 "};\nmov.b64 b, {%33, " UPPER "};\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" PTX_S32 \
                 "}, a, b, p, 1, 1;\n}\n"                                                                           \
                 : PTX_D32(d, 0)                                                                                    \
                 : "r"(a), "r"(b), "r"(accumulate));                                                                \
  }
MLA_SCORES(scores_128, MLA_ROWS_128)
MLA_SCORES(scores_64, MLA_ROWS_64)
#undef MLA_SCORES

// Where column `column`, a multiple of 8, of row `row` lies in a tile.
__device__ __forceinline__ int place_of(int row, int column) {
  const int chunk = column / 16, low = column % 16;
  return column < kLatent ? chunk / 8 * kWideBox + row * 128 + ((chunk % 8) ^ (row % 8)) * 16 + low
                          : kRope + row * 64 + ((chunk % 4) ^ (row / 2 % 4)) * 16 + low;
}

// What e4m3 values leave of two floats, in e4m3: of bfloat16's bits, whose first four they have, the others, down to
// 2^-9.
__device__ __forceinline__ uint32_t rest_of(uint32_t fp8, float x, float y) {
  const float2 held = from_e4m3(fp8);
  return to_e4m3(x - held.x, y - held.y);
}

// A head's query as e4m3 times a power of two, by which the scores' scale is divided; by eight lanes, of which each has
// every eighth 16 bytes.
template <class M>
__device__ __forceinline__ void round_query(M& m, const uint4 (&raw)[9], int head, float scale) {
  const int lane = threadIdx.x % 8;
  float most = 0;
#pragma unroll
  for (int j = 0; j < 9; ++j) {
    const uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      most = fmaxf(most, fmaxf(fabsf(__uint_as_float(words[i] << 16)), fabsf(__uint_as_float(words[i] & 0xffff0000u))));
  }
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
  // The largest comes to lie in [128, 256): 261 = 127 + 127 + 7.
  const int exponent = min(max(__float_as_int(most) >> 23, 30), 254);
  const float factor = __int_as_float((261 - exponent) << 23);
  if (lane == 0) m.scale[head] = scale * __int_as_float((exponent - 7) << 23);
#pragma unroll
  for (int j = 0; j < 9; ++j) {
    const uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
    const int place = place_of(head, (j * 8 + lane) * 8);
    uint32_t two[4];
#pragma unroll
    for (int term = 0; term < M::kTerms; ++term) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = __uint_as_float(words[i] << 16) * factor, y = __uint_as_float(words[i] & 0xffff0000u) * factor;
        two[i] = term ? rest_of(two[i], x, y) : to_e4m3(x, y);
      }
      *reinterpret_cast<uint2*>(m.query[term] + place) = make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
    }
  }
}

// By the warpgroup that scores: a request's queries, four heads of a warp at once, the next four on their way.
template <class M>
__device__ __forceinline__ void take_query(M& m, const Arguments& a, const __nv_bfloat16* query, int request) {
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
__device__ __forceinline__ void ask_scores(M& m, float (&score)[32], int n) {
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

// Those scores, once they are there.
template <class M>
__device__ __forceinline__ void await_scores(M& m, float (&score)[32], int n) {
  wgmma_wait<0>();
  fence_regs(score);
  if (threadIdx.x % 32 == 0) mbar_arrive(&m.empty[n % M::kDepth]);
}

// Of each of this thread's two heads the largest score and the sum of weights.
struct ScoreState {
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
};

// What an item's last step hands on.
template <class M>
__device__ __forceinline__ void finish_scores(M& m, const Arguments& a, const ScoreState& state, int to, int64_t item,
                                              bool alone) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int head = row + 8 * lower;
    float total = state.total[lower];
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
    if (head >= M::kHeads || threadIdx.x % 4 != 0) continue;
    m.inverse[to][head] = total > 0 ? (alone ? a.value_scale : 1.f) / total : 0.f;  // 0: the token sees no row
    const float log = state.top[lower] - kWeightLog + log2f(total);
    if (!alone) reinterpret_cast<float2*>(a.sums)[item * M::kHeads + head] = make_float2(log, a.value_scale);
    else store_lse(a, int64_t(item_of(a, int(item)).request) * M::kHeads + head, log);
  }
}

// The weights of scores, of whose rows `rows` are there, `to` the second warpgroups.
template <class M>
__device__ __forceinline__ void weigh(M& m, const Arguments& a, ScoreState& state, float (&score)[32], int n, int rows,
                                      bool last, int64_t item, bool alone) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane / 4, pair = lane % 4, to = n % 2;
  const float scale[2] = {m.scale[row], m.scale[row + 8]};
  if (rows < kRows + a.tokens - 1) {
    const int heads = M::kHeads / a.tokens, first = rows - (a.tokens - 1);
    const int seen[2] = {first + row / heads, first + (row + 8) / heads};
#pragma unroll
    for (int j = 0; j < 32; ++j)
      if (j / 4 * 8 + pair * 2 + j % 2 >= seen[j % 4 / 2]) score[j] = -INFINITY;
  }
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
__device__ __forceinline__ void score_items(M& m, const Arguments& a, const __nv_bfloat16* query, const Items& items) {
  for (int number = items.begin, n = 0; number < items.end; ++number) {
    const PlannedItem item = item_of(a, number);
    const Part part(item);
    const bool alone = Work<true>(number, item).alone(a);
    const int rows = part.length - part.first * kRows, last = part.count - 1;
    take_query(m, a, query, item.request);
    ScoreState state;
    float score[32], held[32];
    ask_scores(m, score, n);
    for (int i = 0; i < last; ++i) {
      await_scores(m, score, n + i);
#pragma unroll
      for (int j = 0; j < 32; ++j) held[j] = score[j];
      fence_regs(held);
      ask_scores(m, score, n + i + 1);
      weigh(m, a, state, held, n + i, rows - i * kRows, false, number, alone);
    }
    await_scores(m, score, n + last);
    weigh(m, a, state, score, n + last, rows - last * kRows, true, number, alone);
    n += part.count;
  }
}

}  // namespace mla
