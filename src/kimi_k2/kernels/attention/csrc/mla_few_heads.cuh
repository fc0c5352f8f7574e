// MLA decode attention of 8 heads: cache rows, then columns of the latent, lie along the 64 rows of the matrix
// instruction and the heads along its 8 columns, so that nothing is multiplied for absent heads: with eight times the
// MMAs the card lowers its clock. Two warpgroups take every other 64 cache rows, each with its own online softmax
// and its own stage; at the end each finishes half of the latent.
#pragma once
#include "mla_fp8_cache.cuh"

namespace mla {

template <bool FP8_CACHE>
constexpr int kFewThreads = kConsumers + (FP8_CACHE ? 256 : 32);
// Named barriers: one for each warpgroup, and both at the end. compute-sanitizer's racecheck (CUDA 13.0) does not
// follow a barrier without all of a block's warps, nor an arrival apart from its wait: it reports what lies before and
// behind.
constexpr int kWarpgroup = 1, kHanded = 3;
static_assert(kStages == 2, "a stage for each warpgroup: neither can come upon the other one's phase");

// This thread's two heads' share of the maximum over the warpgroup's 64 rows, then weights and their sums.
struct FewState {
  float acc[8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
};

__device__ __forceinline__ void few_scores(const uint8_t* queries, float (&score)[4], const uint8_t* tile,
                                           uint64_t* full, int phase, float scale) {
  const uint32_t query = smem_u32(queries), keys = smem_u32(tile);
  float sums[4][4];  // four chains: no MMA waits for the one before it
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
      few_step<0>(sums[k], descriptor(keys + box * kBoxBytes + k * 32, 16, kEight),
                  descriptor(query + box * kFewHeads * 128 + k * 32, 16, kEight), box > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int k = 0; k < 4; ++k) fence_regs(sums[k]);
#pragma unroll
  for (int j = 0; j < 4; ++j) score[j] = ((sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j])) * scale;
}

// acc = acc * shrink + V^T weights.
__device__ __forceinline__ void few_values(float (&acc)[8][4], const uint8_t* tile, const uint8_t* weights,
                                           const float (&shrink)[2]) {
  if (!__all_sync(~0u, shrink[0] == 1.f && shrink[1] == 1.f)) {
#pragma unroll
    for (int box = 0; box < 8; ++box)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[box][j] *= shrink[j % 2];
  }
#pragma unroll
  for (int box = 0; box < 8; ++box) fence_regs(acc[box]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int box = 0; box < 8; ++box)
      few_step<1>(acc[box], descriptor(smem_u32(tile) + box * kBoxBytes + k * 2 * kEight, kBoxBytes, kEight),
                  descriptor(smem_u32(weights) + k * 32, 16, kEight), 1);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int box = 0; box < 8; ++box) fence_regs(acc[box]);
}

// One step of 64 cache rows, of which `rows` are there.
template <class M>
__device__ __forceinline__ void few_step_rows(M& m, const uint8_t* queries, FewState& state, uint8_t* tile,
                                              uint64_t* full, int phase, float scale, int rows) {
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4, pair = lane % 4 * 2, barrier = kWarpgroup + group;
  float score[4], peak[2], shrink[2];
  few_scores(queries, score, tile, full, phase, scale);
  if (row >= rows) score[0] = score[1] = -INFINITY;
  if (row + 8 >= rows) score[2] = score[3] = -INFINITY;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    peak[h] = fmaxf(score[h], score[2 + h]);
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], mask));
  }
  if (lane < 4) *reinterpret_cast<float2*>(&m.peak[group][warp][pair]) = make_float2(peak[0], peak[1]);
  named_sync(barrier, 128);
  // Every warp has its scores: the weights take the place of the rotated keys, head by head, rows contiguous, swizzled.
  uint8_t* weights = tile + 2 * kHalfBytes;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float best = state.top[h];
#pragma unroll
    for (int w = 0; w < 4; ++w) best = fmaxf(best, m.peak[group][w][pair + h]);
    shrink[h] = exp2_approximate(state.top[h] - best);
    state.top[h] = best;
    const float weight0 = exp2_approximate(score[h] - best), weight1 = exp2_approximate(score[2 + h] - best);
    state.total[h] = state.total[h] * shrink[h] + (weight0 + weight1);
    uint8_t* place = weights + (pair + h) * 128 + row % 8 * 2;
    *reinterpret_cast<__nv_bfloat16*>(place + ((row / 8) ^ (pair + h)) * 16) = __float2bfloat16_rn(weight0);
    *reinterpret_cast<__nv_bfloat16*>(place + ((row / 8 + 1) ^ (pair + h)) * 16) = __float2bfloat16_rn(weight1);
  }
  if (rows < kRows) {
    clear_rows(tile, 0, rows, barrier);
    clear_rows(tile, 1, rows, barrier);
  }
  fence_proxy_async();
  named_sync(barrier, 128);
  few_values(state.acc, tile, weights, shrink);
}

// Number of a head's part: all parts of a head one after another or, by a plan, all heads of a part.
template <bool PLANNED>
__device__ __forceinline__ int64_t few_part(const Arguments& a, const Work<PLANNED>& work, int64_t head, int local) {
  if constexpr (PLANNED) return work.slot(a) * kFewHeads + local;
  else return head * a.splits + work.split;
}

// Joins the warpgroups' states, the first one's first, and writes this one's half of the latent. `role`: 0 for the
// warpgroup with the part's first 64 rows; `parity`: of the block's items so far.
template <bool PLANNED>
__device__ __forceinline__ void few_store(FewMemory<PLANNED>& m, const Arguments& a, FewState& state,
                                          const Work<PLANNED>& work, int role, int parity) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int pair = lane % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) state.total[h] += __shfl_xor_sync(~0u, state.total[h], mask);
  if (lane < 4) {
    *reinterpret_cast<float2*>(&m.total[parity][role][warp][pair]) = make_float2(state.total[0], state.total[1]);
    if (warp == 0) *reinterpret_cast<float2*>(&m.top[parity][role][pair]) = make_float2(state.top[0], state.top[1]);
  }
  float4* mine = m.handed(parity, role) + thread;
  const float4* theirs = m.handed(parity, role ^ 1) + thread;
#pragma unroll
  for (int box = 0; box < 4; ++box) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = role ? state.acc[box][j] : state.acc[box + 4][j];
    mine[box * 128] = make_float4(v[0], v[1], v[2], v[3]);
  }
  named_sync(kHanded, kConsumers);  // racecheck reports what is handed over, see kHanded
  float factor[2][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float top0 = m.top[parity][0][pair + h], top1 = m.top[parity][1][pair + h], best = fmaxf(top0, top1);
    float total0 = 0, total1 = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) total0 += m.total[parity][0][w][pair + h], total1 += m.total[parity][1][w][pair + h];
    const float share0 = exp2_approximate(top0 - best), share1 = exp2_approximate(top1 - best);
    const float total = total0 * share0 + total1 * share1, inverse = a.value_scale / total;
    factor[0][h] = share0 * inverse, factor[1][h] = share1 * inverse;
    if (!work.alone(a) && role == 0 && thread < 4)
      a.sums[few_part(a, work, int64_t(work.request) * kFewHeads + pair + h, pair + h)] = best + log2f(total);
  }
#pragma unroll
  for (int box = 0; box < 4; ++box) {
    const float4 other = theirs[box * 128];
    const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int h = j % 2, column = role * 256 + box * 64 + warp * 16 + j / 2 * 8 + lane / 4;
      const float first = role ? others[j] : state.acc[box][j], second = role ? state.acc[box + 4][j] : others[j];
      const float x = first * factor[0][h] + second * factor[1][h];
      const int64_t head = int64_t(work.request) * kFewHeads + pair + h;
      if (!work.alone(a)) static_cast<float*>(a.parts)[few_part(a, work, head, pair + h) * kLatent + column] = x;
      else a.out[head * kLatent + column] = __float2bfloat16_rn(x);
    }
  }
}

// A part without rows: its sum's logarithm is -inf and its values stay unwritten; the only part of a request is zero.
__device__ void few_store_nothing(const Arguments& a, const Work<false>& work) {
  const int64_t head0 = int64_t(work.request) * kFewHeads;
  if (!work.alone(a)) {
    if (threadIdx.x < kFewHeads) a.sums[(head0 + threadIdx.x) * a.splits + work.split] = -INFINITY;
    return;
  }
  uint4* out = reinterpret_cast<uint4*>(a.out + head0 * kLatent);
  for (int i = threadIdx.x; i < kFewHeads * kLatent / 8; i += blockDim.x) out[i] = make_uint4(0, 0, 0, 0);
}

template <bool FP8_CACHE>
__global__ void __launch_bounds__(kFewThreads<FP8_CACHE>, 1)
    attend_few(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap cache,
               const Arguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  FewMemory<false>& m = *reinterpret_cast<FewMemory<false>*>(raw);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  int page = 0;
  const Work<false> work;
  const Part part = begin<FP8_CACHE>(m, a, &query, &cache, work, group >= 2, &page);
  if (part.count <= 0) return few_store_nothing(a, work);
  if (group >= 2)
    return FP8_CACHE ? convert_rows<kUnits>(m, a, part, work.request, page)
                     : copy_rows(m, a, &cache, part, work.request, page);
  FewState state;
  mbar_wait(&m.query_full[0], 0);
  for (int i = group; i < part.count; i += kStages) {
    few_step_rows(m, m.query[0], state, m.stage[group], m.full[group], i / kStages & 1, a.scale,
                  part.length - (part.first + i) * kRows);
    if (threadIdx.x % 32 == 0)
      for (int one = 0; one < kGroups; ++one) mbar_arrive(&m.empty[group][one]);
  }
  few_store(m, a, state, work, group, 0);
}

// The same by a plan, item after item: while one is stored, the next one's rows arrive.
template <bool FP8_CACHE>
__global__ void __launch_bounds__(kFewThreads<FP8_CACHE>, 1)
    attend_few_planned(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap cache,
                       const Arguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  FewMemory<true>& m = *reinterpret_cast<FewMemory<true>*>(raw);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  int page = 0;
  const Items items = begin_planned<FP8_CACHE>(m, a, &query, &cache, &page);
  if (items.begin >= items.end) return;
  if (group >= 2)
    return FP8_CACHE ? convert_items<kUnits>(m, a, &query, items, page) : copy_items(m, a, &query, &cache, items, page);
  for (int number = items.begin, done = 0; number < items.end; ++number) {
    const PlannedItem item = item_of(a, number);
    const Part part(item);
    const Work<true> work(number, item);
    const int k = number - items.begin, place = k % 2, role = (group ^ done) & 1;
    FewState state;
    mbar_wait(&m.query_full[place], k / 2 & 1);
    for (int i = role; i < part.count; i += kStages) {
      few_step_rows(m, m.query[place], state, m.stage[group], m.full[group], (done + i) / kStages & 1, a.scale,
                    part.length - (part.first + i) * kRows);
      if (threadIdx.x % 32 == 0)
        for (int one = 0; one < kGroups; ++one) mbar_arrive(&m.empty[group][one]);
    }
    if (threadIdx.x % 32 == 0) mbar_arrive(&m.query_empty[place]);
    few_store(m, a, state, work, role, place);
    done += part.count;
  }
}

}  // namespace mla
