// MLA decode attention of 8 and 16 heads: cache rows, then columns of the latent, lie along the 64 rows of the matrix
// instruction and the heads along its 8 or 16 columns, so that nothing is multiplied for absent heads: with four or
// eight times the MMAs the card lowers its clock. Two warpgroups take every other 64 cache rows, each with its own
// online softmax and its own stage; at the end each finishes half of the latent.
#pragma once
#include "mla_fp8_cache.cuh"

namespace mla {

// Groups of four warps that convert: with 16 heads registers are short of a second one's.
template <int HEADS>
constexpr int kFewGroups = HEADS == 8 ? 2 : 1;
template <bool FP8_CACHE, int HEADS>
constexpr int kFewThreads = kConsumers + (FP8_CACHE ? 128 * kFewGroups<HEADS> : 32);
// Named barriers: one for each warpgroup, both at the end, both at the beginning. compute-sanitizer's racecheck (CUDA
// 13.0) does not follow a barrier without all of a block's warps, nor an arrival apart from its wait: it reports what
// lies before and behind. All its reports were held against the disassembly; they are of these pairs alone:
//   what `few_store` hands over (sums, maxima, values): kHanded lies between.
//   the weights, where rotated keys were, and the keys that are converted to the same place for a later step; the zeros
//   of `clear_rows` and rows that are converted there later: a warpgroup's barrier lies between them and its MMAs, and
//   only behind those does each warp's first lane release the stage, on which the converting warp waits.
//   of 32 heads and more, weights and what shrinks: kReady and kFree lie between (mla_attend.cuh).
constexpr int kWarpgroup = 1, kHanded = 3, kQuery = 4;
static_assert(kStages == 2, "a stage for each warpgroup: neither can come upon the other one's phase");

// Of each eight heads this thread has two: their shares of the values, the maximum over the warpgroup's rows, this
// thread's sum of weights.
template <int HEADS>
struct FewState {
  static constexpr int kEights = HEADS / 8;
  float acc[8][4 * kEights] = {}, top[kEights][2], total[kEights][2] = {};
  __device__ __forceinline__ FewState() {
#pragma unroll
    for (int e = 0; e < kEights; ++e) top[e][0] = top[e][1] = -INFINITY;
  }
};

template <bool FP8_CACHE, int HEADS>
__device__ __forceinline__ void few_scores(const uint8_t* queries, float (&score)[HEADS / 2], const uint8_t* tile,
                                           uint64_t* full, int phase, float scale) {
  const uint32_t query = smem_u32(queries), keys = smem_u32(tile);
  float sums[4][HEADS / 2];  // four chains: no MMA waits for the one before it
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    if (box % 4 == 0) {
      mbar_wait(full + box / 4, phase);
#pragma unroll
      for (int k = 0; k < 4; ++k) fence_regs(sums[k]);
      wgmma_fence();
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      Instructions<FP8_CACHE>::template few<0>(sums[k], descriptor(keys + box * kBoxBytes + k * 32, 16, kEight),
                                               descriptor(query + box * HEADS * 128 + k * 32, 16, kEight), box > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int k = 0; k < 4; ++k) fence_regs(sums[k]);
#pragma unroll
  for (int j = 0; j < HEADS / 2; ++j) score[j] = ((sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j])) * scale;
}

// acc = acc * shrink + V^T weights.
template <bool FP8_CACHE, int HEADS>
__device__ __forceinline__ void few_values(float (&acc)[8][HEADS / 2], const uint8_t* tile, const uint8_t* weights,
                                           const float (&shrink)[HEADS / 8][2]) {
  bool same = true;
#pragma unroll
  for (int e = 0; e < HEADS / 8; ++e) same = same && shrink[e][0] == 1.f && shrink[e][1] == 1.f;
  if (!__all_sync(~0u, same)) {
#pragma unroll
    for (int box = 0; box < 8; ++box)
#pragma unroll
      for (int j = 0; j < HEADS / 2; ++j) acc[box][j] *= shrink[j / 4][j % 2];
  }
#pragma unroll
  for (int box = 0; box < 8; ++box) fence_regs(acc[box]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int box = 0; box < 8; ++box)
      Instructions<FP8_CACHE>::template few<1>(
          acc[box], descriptor(smem_u32(tile) + box * kBoxBytes + k * 2 * kEight, kBoxBytes, kEight),
          descriptor(smem_u32(weights) + k * 32, 16, kEight), 1);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int box = 0; box < 8; ++box) fence_regs(acc[box]);
}

// By both warpgroups, also by one that has no rows of the part.
template <bool FP8_CACHE, int HEADS, class M>
__device__ __forceinline__ void await_few_query(M& m, int place, int phase) {
  mbar_wait(&m.query_full[place], phase);
  if constexpr (FP8_CACHE) shrink_query<HEADS * 128, kConsumers>(m.query[place], HEADS, threadIdx.x, kQuery);
  else if constexpr (HEADS > 8) named_sync(kQuery, kConsumers);
}

// One step of 64 cache rows, of which `rows` are there.
template <bool FP8_CACHE, int HEADS, class M>
__device__ __forceinline__ void few_step_rows(M& m, const Arguments& a, const uint8_t* queries, FewState<HEADS>& state,
                                              uint8_t* tile, uint64_t* full, int phase, int rows) {
  constexpr int kEights = HEADS / 8;
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4, pair = lane % 4 * 2, barrier = kWarpgroup + group;
  float score[HEADS / 2], shrink[kEights][2];
  few_scores<FP8_CACHE, HEADS>(queries, score, tile, full, phase, a.scale);
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    // Of two tokens with eight heads each the first one sees a row less.
    const int seen = rows - (kEights > 1 ? (a.tokens - 1) * (1 - e) : 0);
    float* const s = score + 4 * e;
    if (row >= seen) s[0] = s[1] = -INFINITY;
    if (row + 8 >= seen) s[2] = s[3] = -INFINITY;
    float peak[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      peak[h] = fmaxf(s[h], s[2 + h]);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], mask));
    }
    if (lane < 4) *reinterpret_cast<float2*>(&m.peak[group][warp][8 * e + pair]) = make_float2(peak[0], peak[1]);
  }
  named_sync(barrier, 128);
  // Every warp has its scores: the weights take the place of the rotated keys, head by head, rows contiguous, swizzled.
  uint8_t* weights = tile + 2 * kHalfBytes;
#pragma unroll
  for (int e = 0; e < kEights; ++e)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float& top = state.top[e][h];
      float best = top;
#pragma unroll
      for (int w = 0; w < 4; ++w) best = fmaxf(best, m.peak[group][w][8 * e + pair + h]);
      // A token that came before another may see none of the rows.
      const float base = kEights > 1 && best == -INFINITY ? 0.f : best;
      shrink[e][h] = exp2_approximate(top - base);
      top = best;
      const float weight0 = exp2_approximate(score[4 * e + h] - base);
      const float weight1 = exp2_approximate(score[4 * e + 2 + h] - base);
      state.total[e][h] = state.total[e][h] * shrink[e][h] + (weight0 + weight1);
      uint8_t* place = weights + (8 * e + pair + h) * 128 + row % 8 * 2;
      const uint32_t both = pack<FP8_CACHE>(weight0, weight1);
      *reinterpret_cast<uint16_t*>(place + ((row / 8) ^ (pair + h)) * 16) = uint16_t(both);
      *reinterpret_cast<uint16_t*>(place + ((row / 8 + 1) ^ (pair + h)) * 16) = uint16_t(both >> 16);
    }
  if (rows < kRows) {
    clear_rows(tile, 0, rows, barrier);
    clear_rows(tile, 1, rows, barrier);
  }
  fence_proxy_async();
  named_sync(barrier, 128);
  few_values<FP8_CACHE, HEADS>(state.acc, tile, weights, shrink);
}

// Number of a head's part: all parts of a head one after another or, by a plan, all heads of a part.
template <int HEADS, bool PLANNED>
__device__ __forceinline__ int64_t few_part(const Arguments& a, const Work<PLANNED>& work, int local) {
  if constexpr (PLANNED) return work.slot(a) * HEADS + local;
  else return (int64_t(work.request) * HEADS + local) * a.splits + work.split;
}

// Joins the warpgroups' states, the first one's first, and writes this one's half of the latent. `role`: 0 for the
// warpgroup with the part's first 64 rows; `parity`: of the block's items so far.
template <int HEADS, bool PLANNED>
__device__ __forceinline__ void few_store(FewMemory<HEADS, PLANNED>& m, const Arguments& a, FewState<HEADS>& state,
                                          const Work<PLANNED>& work, int role, int parity) {
  constexpr int kEights = HEADS / 8;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int pair = lane % 4 * 2;
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    float (&total)[2] = state.total[e];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) total[h] += __shfl_xor_sync(~0u, total[h], mask);
    if (lane < 4) {
      const int head = 8 * e + pair;
      *reinterpret_cast<float2*>(&m.total[parity][role][warp][head]) = make_float2(total[0], total[1]);
      if (warp == 0)
        *reinterpret_cast<float2*>(&m.top[parity][role][head]) = make_float2(state.top[e][0], state.top[e][1]);
    }
  }
  float4* mine = m.handed(parity, role) + thread;
  const float4* theirs = m.handed(parity, role ^ 1) + thread;
#pragma unroll
  for (int box = 0; box < 4; ++box)
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = role ? state.acc[box][4 * e + j] : state.acc[box + 4][4 * e + j];
      mine[(box * kEights + e) * 128] = make_float4(v[0], v[1], v[2], v[3]);
    }
  named_sync(kHanded, kConsumers);  // racecheck reports what is handed over, see kHanded
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    float factor[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = 8 * e + pair + h;
      const float top0 = m.top[parity][0][head], top1 = m.top[parity][1][head], best = fmaxf(top0, top1);
      float total0 = 0, total1 = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) total0 += m.total[parity][0][w][head], total1 += m.total[parity][1][w][head];
      const float base = kEights > 1 && best == -INFINITY ? 0.f : best;
      const float share0 = exp2_approximate(top0 - base), share1 = exp2_approximate(top1 - base);
      const float total = total0 * share0 + total1 * share1;
      const float inverse = kEights > 1 && !(total > 0) ? 0.f : a.value_scale / total;  // 0: the token sees no row
      factor[0][h] = share0 * inverse, factor[1][h] = share1 * inverse;
      if (role == 0 && thread < 4) {
        if (work.alone(a)) store_lse(a, int64_t(work.request) * HEADS + head, best + log2f(total));
        else a.sums[few_part<HEADS>(a, work, head)] = best + log2f(total);
      }
    }
#pragma unroll
    for (int box = 0; box < 4; ++box) {
      const float4 other = theirs[(box * kEights + e) * 128];
      const float others[4] = {other.x, other.y, other.z, other.w};
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float own = role ? state.acc[box + 4][4 * e + j] : state.acc[box][4 * e + j];
        const float first = role ? others[j] : own, second = role ? own : others[j];
        x[j] = first * factor[0][j % 2] + second * factor[1][j % 2];
      }
      const int begin = role * 256 + box * 64 + warp * 16;
      if (!work.alone(a)) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int head = 8 * e + pair + j % 2, column = begin + j / 2 * 8 + lane / 4;
          static_cast<float*>(a.parts)[few_part<HEADS>(a, work, head) * kLatent + column] = x[j];
        }
      } else {
        // Two heads of a column become two columns of a head.
        const int64_t head = int64_t(work.request) * HEADS + 8 * e + lane / 4;
        uint32_t* out = reinterpret_cast<uint32_t*>(a.out + head * kLatent + begin) + lane % 4;
        out[0] = transpose_8x8(pack_bf16(x[0], x[1]));
        out[4] = transpose_8x8(pack_bf16(x[2], x[3]));
      }
    }
  }
}

// A part without rows: its sum's logarithm is -inf and its values stay unwritten; the only part of a request is zero.
template <int HEADS>
__device__ void few_store_nothing(const Arguments& a, const Work<false>& work) {
  const int64_t head0 = int64_t(work.request) * HEADS;
  if (!work.alone(a)) {
    if (threadIdx.x < HEADS) a.sums[(head0 + threadIdx.x) * a.splits + work.split] = -INFINITY;
    return;
  }
  uint4* out = reinterpret_cast<uint4*>(a.out + head0 * kLatent);
  for (int i = threadIdx.x; i < HEADS * kLatent / 8; i += blockDim.x) out[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < HEADS) store_lse(a, head0 + threadIdx.x, -INFINITY);
}

template <bool FP8_CACHE, int HEADS>
__global__ void __launch_bounds__(kFewThreads<FP8_CACHE, HEADS>, 1)
    attend_few(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap cache,
               const Arguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  FewMemory<HEADS, false>& m = *reinterpret_cast<FewMemory<HEADS, false>*>(raw);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  int page = 0;
  const Work<false> work;
  const Part part = begin<FP8_CACHE>(m, a, &query, &cache, work, group >= 2, &page);
  if (part.count <= 0) return few_store_nothing<HEADS>(a, work);
  if (group >= 2)
    return FP8_CACHE ? convert_rows<kFewGroups<HEADS>>(m, a, part, work.request, page)
                     : copy_rows(m, a, &cache, part, work.request, page);
  FewState<HEADS> state;
  await_few_query<FP8_CACHE, HEADS>(m, 0, 0);
  for (int i = group; i < part.count; i += kStages) {
    few_step_rows<FP8_CACHE, HEADS>(m, a, m.query[0], state, m.stage[group], m.full[group], i / kStages & 1,
                                    part.length - (part.first + i) * kRows);
    if (threadIdx.x % 32 == 0)
      for (int one = 0; one < kGroups; ++one) mbar_arrive(&m.empty[group][one]);
  }
  few_store<HEADS>(m, a, state, work, group, 0);
}

// The same by a plan, item after item: while one is stored, the next one's rows arrive.
template <bool FP8_CACHE, int HEADS>
__global__ void __launch_bounds__(kFewThreads<FP8_CACHE, HEADS>, 1)
    attend_few_planned(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap cache,
                       const Arguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  FewMemory<HEADS, true>& m = *reinterpret_cast<FewMemory<HEADS, true>*>(raw);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  int page = 0;
  const Items items = begin_planned<FP8_CACHE>(m, a, &query, &cache, &page);
  clear_empty(a);
  if (items.begin >= items.end) return;
  if (group >= 2)
    return FP8_CACHE ? convert_items<kFewGroups<HEADS>>(m, a, &query, items, page)
                     : copy_items(m, a, &query, &cache, items, page);
  for (int number = items.begin, done = 0; number < items.end; ++number) {
    const PlannedItem item = item_of(a, number);
    const Part part(item);
    const Work<true> work(number, item);
    const int k = number - items.begin, place = k % 2, role = (group ^ done) & 1;
    FewState<HEADS> state;
    await_few_query<FP8_CACHE, HEADS>(m, place, k / 2 & 1);
    for (int i = role; i < part.count; i += kStages) {
      few_step_rows<FP8_CACHE, HEADS>(m, a, m.query[place], state, m.stage[group], m.full[group],
                                      (done + i) / kStages & 1, part.length - (part.first + i) * kRows);
      if (threadIdx.x % 32 == 0)
        for (int one = 0; one < kGroups; ++one) mbar_arrive(&m.empty[group][one]);
    }
    if (threadIdx.x % 32 == 0) mbar_arrive(&m.query_empty[place]);
    few_store<HEADS>(m, a, state, work, role, place);
    done += part.count;
  }
}

}  // namespace mla
