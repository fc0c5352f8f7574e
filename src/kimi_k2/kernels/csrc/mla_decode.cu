// MLA decode attention: a block takes all heads (at most 64) of one request over one part of its context, 64 cache rows
// a step. One warp copies: nine boxes of 64 columns a step through the tensor memory accelerator. The first warpgroup
// computes the scores, their online softmax in base 2 and the left 256 columns of the values; the second takes the
// weights from shared memory, in the first one's register order, and computes the right 256 columns. Keys and values
// are the same bytes: K-major for the scores, MN-major for the values.
#include "mla_cluster.cuh"
#include "mla_copy.cuh"
#include "mla_join.cuh"
#include "mla_store.cuh"

namespace mla {

// acc = acc * shrink + weights V over 256 columns.
__device__ __forceinline__ void add_values(float (&acc)[2][64], const uint32_t (&weights)[4][4], const uint8_t* stage,
                                           int half, float shrink0, float shrink1) {
  if (!__all_sync(~0u, shrink0 == 1.f && shrink1 == 1.f)) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[n][i] *= i % 4 < 2 ? shrink0 : shrink1;
  }
  const uint32_t base = smem_u32(stage) + half * kHalfBytes;
  moe::fence_regs(acc[0]);
  moe::fence_regs(acc[1]);
  moe::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      values_step(acc[n], weights[k],
                  descriptor(base + n * 2 * kBoxBytes + k * 2 * kEight, kBoxBytes, kEight));
  moe::wgmma_commit();
  moe::wgmma_wait<0>();
  moe::fence_regs(acc[0]);
  moe::fence_regs(acc[1]);
}

template <bool FEW>
__device__ void score_and_left(Memory<FEW>& m, const Arguments& a, const Part& part, int request, int split) {
  using S = Shape<FEW>;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
  float acc[2][64] = {}, top0 = -INFINITY, top1 = -INFINITY, total0 = 0, total1 = 0;
  if (part.count > 0) mbar_wait(&m.query_full, 0);
  for (int i = 0; i < part.count; ++i) {
    const int stage = i % S::kStages, phase = i / S::kStages & 1;
    float score[32];
    const uint32_t query = smem_u32(m.query), keys = smem_u32(m.stage[stage]);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (box % 4 == 0) {
        mbar_wait(&m.full[stage][box / 4], phase);
        moe::wgmma_fence();
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int place = box / 4 * kHalfBytes + box % 4 * kBoxBytes + k * 32;
        scores_step(score, descriptor(query + box * S::kQueryBox + k * 32, 16, kEight),
                    descriptor(keys + place, 16, kEight), box + k > 0);
      }
    }
    moe::wgmma_commit();
    moe::wgmma_wait<0>();
    moe::fence_regs(score);
    if (lane == 0) moe::mbar_arrive(&m.empty[stage][2]);

    const int rows = part.length - (part.first + i) * kRows;
    float shrink0 = 1, shrink1 = 1;
    uint32_t weights[4][4] = {};
    if (!FEW || warp == 0) {
#pragma unroll
      for (int j = 0; j < 32; ++j) score[j] *= a.scale;
      if (rows < kRows) {
#pragma unroll
        for (int j = 0; j < 32; ++j)
          if (j / 4 * 8 + lane % 4 * 2 + j % 2 >= rows) score[j] = -INFINITY;
      }
      float new0 = top0, new1 = top1;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        if (j % 4 < 2)
          new0 = fmaxf(new0, score[j]);
        else
          new1 = fmaxf(new1, score[j]);
      }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) {
        new0 = fmaxf(new0, __shfl_xor_sync(~0u, new0, mask));
        new1 = fmaxf(new1, __shfl_xor_sync(~0u, new1, mask));
      }
      shrink0 = exp2_approximate(top0 - new0);
      shrink1 = FEW ? 1.f : exp2_approximate(top1 - new1);
      top0 = new0;
      top1 = new1;
      float sum0 = 0, sum1 = 0;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        if (j % 4 < 2) {
          score[j] = exp2_approximate(score[j] - new0);
          sum0 += score[j];
        } else {
          score[j] = FEW ? 0.f : exp2_approximate(score[j] - new1);
          sum1 += score[j];
        }
      }
      total0 = total0 * shrink0 + sum0;
      total1 = total1 * shrink1 + sum1;
#pragma unroll
      for (int j = 0; j < 16; ++j) weights[j / 4][j % 4] = moe::pack_bf16(score[2 * j], score[2 * j + 1]);
    }
    if (i > 0) moe::named_sync(kFree, kConsumers);
    if (!FEW || warp == 0) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (FEW)
          reinterpret_cast<uint2*>(m.weights)[k * 32 + lane] = make_uint2(weights[k][0], weights[k][2]);
        else
          reinterpret_cast<uint4*>(m.weights)[k * 128 + thread] =
              make_uint4(weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
      }
      if (lane % 4 == 0) {
        m.shrink[row] = shrink0;
        m.shrink[row + 8] = shrink1;
      }
    }
    named_arrive(kReady, kConsumers);
    if (rows < kRows) clear_rows(m.stage[stage], 0, rows);
    add_values(acc, weights, m.stage[stage], 0, shrink0, shrink1);
    if (lane == 0) moe::mbar_arrive(&m.empty[stage][0]);
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    total0 += __shfl_xor_sync(~0u, total0, mask);
    total1 += __shfl_xor_sync(~0u, total1, mask);
  }
  if (lane % 4 == 0) {
    m.top[row] = top0;
    m.top[row + 8] = top1;
    m.total[row] = total0;
    m.total[row + 8] = total1;
  }
  if (a.cluster > 1) return join_cluster(m, a, acc, request, split, 0);
  named_arrive(kTotals, kConsumers);
  if (a.splits > 1 && lane % 4 == 0) {
    float* sums = a.sums + int64_t(request) * a.heads * a.splits + split;
    if (row < a.heads) sums[row * a.splits] = top0 + log2f(total0);
    if (row + 8 < a.heads) sums[(row + 8) * a.splits] = top1 + log2f(total1);
  }
  store(a, acc, request, split, 0, total0, total1);
}

template <bool FEW>
__device__ void right(Memory<FEW>& m, const Arguments& a, const Part& part, int request, int split) {
  using S = Shape<FEW>;
  const int thread = threadIdx.x - 128, warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
  float acc[2][64] = {};
  for (int i = 0; i < part.count; ++i) {
    const int stage = i % S::kStages, phase = i / S::kStages & 1;
    const int rows = part.length - (part.first + i) * kRows;
    mbar_wait(&m.full[stage][1], phase);
    if (rows < kRows) clear_rows(m.stage[stage], 1, rows);
    uint32_t weights[4][4] = {};
    float shrink0 = 1, shrink1 = 1;
    moe::named_sync(kReady, kConsumers);
    if (!FEW || warp == 0) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (FEW) {
          const uint2 two = reinterpret_cast<const uint2*>(m.weights)[k * 32 + lane];
          weights[k][0] = two.x, weights[k][2] = two.y;
        } else {
          const uint4 four = reinterpret_cast<const uint4*>(m.weights)[k * 128 + thread];
          weights[k][0] = four.x, weights[k][1] = four.y, weights[k][2] = four.z, weights[k][3] = four.w;
        }
      }
      shrink0 = m.shrink[row];
      shrink1 = m.shrink[row + 8];
    }
    if (i + 1 < part.count) named_arrive(kFree, kConsumers);
    add_values(acc, weights, m.stage[stage], 1, shrink0, shrink1);
    if (lane == 0) moe::mbar_arrive(&m.empty[stage][1]);
  }
  if (a.cluster > 1) return join_cluster(m, a, acc, request, split, 1);
  moe::named_sync(kTotals, kConsumers);
  store(a, acc, request, split, 1, m.total[row], m.total[row + 8]);
}

template <bool FEW>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap cache, const Arguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Memory<FEW>& m = *reinterpret_cast<Memory<FEW>*>(raw);
  const int split = blockIdx.x, request = blockIdx.y, role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == kConsumers) {
    moe::prefetch_tensormap(&query);
    moe::prefetch_tensormap(&cache);
    moe::mbar_init(&m.query_full, 1);
    for (int stage = 0; stage < Shape<FEW>::kStages; ++stage)
      for (int group = 0; group < kGroups; ++group) {
        moe::mbar_init(&m.full[stage][group], 1);
        moe::mbar_init(&m.empty[stage][group], 4);  // the warps of the group's last reader
      }
    moe::fence_mbar_init();
  }
  __syncthreads();
  moe::pdl_wait();
  moe::pdl_launch();
  // The page numbers come to the L2 while the length is awaited that says which of them are needed.
  const int line = (int(threadIdx.x) - kConsumers) * 32;
  if (a.table && line >= 0 && line < a.table_stride)
    moe::prefetch_l2(a.table + int64_t(request) * a.table_stride + line);
  const Part part(a, split, request);
  if (part.count <= 0 && a.cluster == 1) return store_empty(a, request, split);
  if (role == 2) {
    moe::reg_dealloc<kCopierRegisters>();
    if (threadIdx.x < kConsumers + 32 && part.count > 0)
      copy_rows<FEW>(m, a, &query, &cache, part, request);
  } else {
    moe::reg_alloc<kConsumerRegisters>();
    if (role == 0)
      score_and_left<FEW>(m, a, part, request, split);
    else
      right<FEW>(m, a, part, request, split);
  }
}

}  // namespace mla
