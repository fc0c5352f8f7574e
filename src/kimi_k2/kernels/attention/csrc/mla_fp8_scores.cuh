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

// A request's queries, by so many warps: four heads of a warp at once, the next four on their way.
template <class M>
__device__ __forceinline__ void take_query(M& m, const Arguments& a, const __nv_bfloat16* query, int request,
                                           int warps) {
  const int warp = threadIdx.x / 32, within = threadIdx.x % 32 / 8;
  const uint4* const from =
      reinterpret_cast<const uint4*>(query + int64_t(request) * M::kHeads * kRow) + threadIdx.x % 8;
  const auto load = [&](uint4(&to)[9], int head) {
#pragma unroll
    for (int j = 0; j < 9; ++j) to[j] = __ldcg(from + head * (kRow / 8) + j * 8);
  };
  uint4 raw[9], next[9];
  if (warp * 4 < M::kHeads) load(next, warp * 4 + within);
#pragma unroll 1
  for (int four = warp * 4; four < M::kHeads; four += warps * 4) {
#pragma unroll
    for (int j = 0; j < 9; ++j) raw[j] = next[j];
    if (four + warps * 4 < M::kHeads) load(next, four + warps * 4 + within);
    round_query(m, raw, four + within, a.scale);
  }
  fence_proxy_async();
}

// The first item's queries, by all that compute.
template <class M>
__device__ __forceinline__ void take_first_query(M& m, const Arguments& a, const __nv_bfloat16* query,
                                                 const Items& items) {
  take_query(m, a, query, item_of(a, items.begin).request, kTakers);
  named_sync(kAllTakers, kTakers * 32);
}

// By the warpgroup that scores, behind an item before.
template <class M>
__device__ __forceinline__ void take_next_query(M& m, const Arguments& a, const __nv_bfloat16* query, int request) {
  named_sync(kScorers, 128);  // the last one is no longer read
  take_query(m, a, query, request, 4);
  named_sync(kScorers, 128);
}

// Scores of 64 cache rows that the tensor cores are asked for in pieces of EACH instructions: a warp that asks for all
// at once waits for nearly all of them, as few instructions are taken ahead. `n` steps of the block come before. Small
// terms first.
template <class M, int EACH = 4>
struct AskedScores {
  static constexpr int kTerm = kRow / 32, kAll = M::kTerms * kTerm, kLast = 7;
  float (&score)[32];
  uint32_t queries, keys;
  __device__ __forceinline__ AskedScores(M& m, float (&score)[32], int n)
      : score(score), queries(lower_half(m.query)), keys(lower_half(m.stage[n % M::kDepth])) {
    mbar_wait(&m.full[n % M::kDepth], n / M::kDepth & 1);
    fence_regs(score);
  }
  // Pieces 0 to `kLast`, each once.
  __device__ __forceinline__ void ask(int piece) const {
    if (piece * EACH < kAll) wgmma_fence();
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      if (min(i / EACH, kLast) != piece) continue;
      const int k = i % kTerm, at = k < 16 ? (k / 4 * kWideBox + k % 4 * 32) / 16 : kRope / 16 + (k - 16) * 2;
      const uint32_t query = queries + (M::kTerms - 1 - i / kTerm) * (kTile / 16) + at;
      if (k < 16) scores_128(score, query, keys + at, i > 0);
      else scores_64(score, query, keys + at, 1);
    }
    if (piece == kLast) wgmma_commit();
  }
  __device__ __forceinline__ void ask_all() const {
#pragma unroll
    for (int piece = 0; piece <= kLast; ++piece) ask(piece);
  }
};
// Behind an item's last step.
struct NoScores {
  __device__ __forceinline__ void ask(int) const {}
};

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

// Scores of this thread's two heads, `row` and the eighth behind it, over rows that they do not see; `rows` are there.
template <class M>
__device__ __forceinline__ void hide_rows(const Arguments& a, float (&score)[32], int row, int pair, int rows) {
  if (rows >= kRows + a.tokens - 1) return;
  const int heads = M::kHeads / a.tokens, first = rows - (a.tokens - 1);
  const int seen[2] = {first + row / heads, first + (row + 8) / heads};
#pragma unroll
  for (int j = 0; j < 32; ++j)
    if (j / 4 * 8 + pair * 2 + j % 2 >= seen[j % 4 / 2]) score[j] = -INFINITY;
}

// The weights of scores, of whose rows `rows` are there, `to` the second warpgroups; `next` is asked for in between.
template <class M, class Next>
__device__ __forceinline__ void weigh(M& m, const Arguments& a, ScoreState& state, float (&score)[32], int n, int rows,
                                      bool last, int64_t item, bool alone, const Next& next) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane / 4, pair = lane % 4, to = n % 2;
  const float scale[2] = {m.scale[row], m.scale[row + 8]};
  next.ask(0);
  hide_rows<M>(a, score, row, pair, rows);
  float best[2] = {score[0], score[2]}, shrink[2], base[2], sum[2] = {};
#pragma unroll
  for (int j = 0; j < 32; ++j) best[j % 4 / 2] = fmaxf(best[j % 4 / 2], score[j]);
  fence_regs(best);
  next.ask(1);
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) best[lower] = fmaxf(best[lower], __shfl_xor_sync(~0u, best[lower], mask));
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    best[lower] *= scale[lower];
    const float top = best[lower] > state.top[lower] + kSlack ? best[lower] : state.top[lower];
    // Nothing seen yet: a token that came before others may find its last rows in another part.
    base[lower] = top == -INFINITY ? 0.f : top;
    shrink[lower] = exp2_approximate(state.top[lower] - base[lower]);
    state.top[lower] = top, base[lower] -= kWeightLog;
  }
  fence_regs(base);
  next.ask(2);
  mbar_wait(&m.weights_empty[to], (n / 2 & 1) ^ 1);
  // A matrix is 8 heads by 8 rows; four are both eights of this warp's heads by 16 rows.
  const uint32_t place = smem_u32(m.weights[to]) + (warp * 16 + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float s[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      s[j] = exp2_approximate(score[8 * k + j] * scale[j % 4 / 2] - base[j % 4 / 2]);
      sum[j % 4 / 2] += s[j];
    }
    if (warp * 16 < M::kHeads)
      stmatrix_x4(place ^ k * 32, pack_f16(s[0], s[1]), pack_f16(s[2], s[3]), pack_f16(s[4], s[5]),
                  pack_f16(s[6], s[7]));
    next.ask(3 + k);
  }
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) state.total[lower] = state.total[lower] * shrink[lower] + sum[lower];
  const bool grown =
      __any_sync(~0u, (row < M::kHeads && shrink[0] != 1.f) || (row + 8 < M::kHeads && shrink[1] != 1.f));
  if (pair == 0) m.shrink[to][row] = shrink[0], m.shrink[to][row + 8] = shrink[1];
  if (lane == 0) reinterpret_cast<uint8_t*>(&m.grown[to])[warp] = grown;
  if (last) finish_scores(m, a, state, to, item, alone);
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) mbar_arrive(&m.weights_full[to]);
  next.ask(7);
}

template <class M>
__device__ __forceinline__ void score_items(M& m, const Arguments& a, const __nv_bfloat16* query, const Items& items) {
  take_first_query(m, a, query, items);
  for (int number = items.begin, n = 0; number < items.end; ++number) {
    const PlannedItem item = item_of(a, number);
    const Part part(item);
    const bool alone = Work<true>(number, item).alone(a);
    const int rows = part.length - part.first * kRows, last = part.count - 1;
    if (n > 0) take_next_query(m, a, query, item.request);
    ScoreState state;
    float score[32], held[32];
    AskedScores<M>(m, score, n).ask_all();
    for (int i = 0; i < last; ++i) {
      await_scores(m, score, n + i);
#pragma unroll
      for (int j = 0; j < 32; ++j) held[j] = score[j];
      fence_regs(held);
      weigh(m, a, state, held, n + i, rows - i * kRows, false, number, alone, AskedScores<M>(m, score, n + i + 1));
    }
    await_scores(m, score, n + last);
    weigh(m, a, state, score, n + last, rows - last * kRows, true, number, alone, NoScores{});
    n += part.count;
  }
}

}  // namespace mla
