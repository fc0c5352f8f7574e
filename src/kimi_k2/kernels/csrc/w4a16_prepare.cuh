// Prepared mode: the launches around the main one, which sort the pairs by expert before it and sum its parts after it.
#pragma once
#include "w4a16.cuh"

namespace w4a16 {

constexpr int kSortThreads = 1024;

// Scratch of the sort, zero between launches except for the cursors.
struct SortScratch {
  int count[moe::kMaxExperts];
  int cursor[moe::kMaxExperts];  // next free slot of each expert
  unsigned arrived;
};

// This block's pairs, counted by expert in shared memory.
__device__ __forceinline__ void count_pairs(const Args& a, int* count) {
  const int tid = threadIdx.x, pairs = a.tokens * a.top_k, stride = gridDim.x * kSortThreads;
  if (tid < moe::kMaxExperts) count[tid] = 0;
  __syncthreads();
  for (int p = blockIdx.x * kSortThreads + tid; p < pairs; p += stride) {
    const int e = moe::local_expert(a, p);
    if (e >= 0) atomicAdd(&count[e], 1);
  }
  __syncthreads();
}

// First launch: count; the last block cuts each expert's pairs into tiles of even size.
__global__ void __launch_bounds__(kSortThreads, 1) count_kernel(const __grid_constant__ Args a) {
  __shared__ int count[moe::kMaxExperts];
  __shared__ int warp_sum[2][32];
  __shared__ bool last;
  SortScratch& scratch = *static_cast<SortScratch*>(a.xq);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (a.pdl) {
    moe::pdl_launch();
    moe::pdl_wait();
  }
  count_pairs(a, count);
  if (tid < moe::kMaxExperts && count[tid]) atomicAdd(&scratch.count[tid], count[tid]);
  moe::fence_gpu();
  __syncthreads();
  if (tid == 0) last = atomicInc(&scratch.arrived, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  moe::fence_gpu();
  int n = 0;
  if (tid < moe::kMaxExperts) {
    n = __ldcg(&scratch.count[tid]);
    scratch.count[tid] = 0;
  }
  const int tiles = (n + a.nmax - 1) / a.nmax;
  int slots = n, cells = tiles;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int u = __shfl_up_sync(0xffffffffu, slots, d), v = __shfl_up_sync(0xffffffffu, cells, d);
    if (lane >= d) slots += u, cells += v;
  }
  if (lane == 31) warp_sum[0][warp] = slots, warp_sum[1][warp] = cells;
  __syncthreads();
  for (int w = 0; w < warp; ++w) slots += warp_sum[0][w], cells += warp_sum[1][w];
  if (tid == kSortThreads - 1) *a.num_tiles = cells;
  if (tid < moe::kMaxExperts) scratch.cursor[tid] = slots - n;
  const int even = tiles ? min(a.nmax, ((n + tiles - 1) / tiles + 7) / 8 * 8) : 0;
  for (int i = 0, off = 0; i < tiles; ++i, off += even)
    a.tiles[cells - tiles + i] = make_int4(tid, slots - n + off, max(0, min(even, n - off)), 0);
}

// Second launch: put each pair into one of its expert's slots; which one does not matter to any sum.
__global__ void __launch_bounds__(kSortThreads, 1) scatter_kernel(const __grid_constant__ Args a) {
  __shared__ int cursor[moe::kMaxExperts];
  SortScratch& scratch = *static_cast<SortScratch*>(a.xq);
  const int tid = threadIdx.x, pairs = a.tokens * a.top_k, stride = gridDim.x * kSortThreads;
  if (a.pdl) {
    moe::pdl_launch();
    moe::pdl_wait();
  }
  count_pairs(a, cursor);
  if (tid < moe::kMaxExperts && cursor[tid]) cursor[tid] = atomicAdd(&scratch.cursor[tid], cursor[tid]);
  __syncthreads();
  for (int p = blockIdx.x * kSortThreads + tid; p < pairs; p += stride) {
    const int e = moe::local_expert(a, p);
    if (e >= 0) a.sorted_pair[atomicAdd(&cursor[e], 1)] = p;
  }
}

// Last launch: out[t] = sum of the token's weighted parts, in order. All loads of eight parts are under way together,
// valid or not; what an invalid pair left is not looked at.
__global__ void __launch_bounds__(128) sum_kernel(const __grid_constant__ Args a) {
  const int t = blockIdx.x, col = (blockIdx.y * 128 + threadIdx.x) * 8, parts = a.top_k * a.splits2;
  if (a.pdl) {
    moe::pdl_launch();
    moe::pdl_wait();
  }
  if (col >= a.hidden) return;
  const __nv_bfloat16* base = static_cast<const __nv_bfloat16*>(a.contrib) + (size_t)t * parts * a.hidden + col;
  float sum[8] = {};
  for (int c0 = 0; c0 < parts; c0 += 8) {
    uint4 raw[8];
    bool valid[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      raw[i] = __ldcg(reinterpret_cast<const uint4*>(base + (size_t)min(c0 + i, parts - 1) * a.hidden));
#pragma unroll
    for (int i = 0; i < 8; ++i)
      valid[i] = c0 + i < parts && moe::local_expert(a, t * a.top_k + min(c0 + i, parts - 1) / a.splits2) >= 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&w[k]));
        sum[2 * k] += valid[i] ? u.x : 0.f;
        sum[2 * k + 1] += valid[i] ? u.y : 0.f;
      }
    }
  }
  *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + col) =
      make_uint4(moe::pack_bf16(sum[0], sum[1]), moe::pack_bf16(sum[2], sum[3]), moe::pack_bf16(sum[4], sum[5]),
                 moe::pack_bf16(sum[6], sum[7]));
}

}  // namespace w4a16
