// Prepared mode: the launches around the main one, which sort the pairs by expert before it and sum its parts after it.
#pragma once
#include "add_parts.cuh"
#include "w4a16.cuh"

namespace w4a16 {

constexpr int kSortThreads = 1024;

// Of the sort, among the control words: zero before and after every call.
struct SortCounters {
  int count[moe::kMaxExperts];
  unsigned arrived;
};
// Next free slot of each expert: data, which a call leaves as it likes.
__device__ __forceinline__ int* sort_cursors(const Args& a) { return reinterpret_cast<int*>(a.inter_s); }

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
  SortCounters& counters = *static_cast<SortCounters*>(a.xq);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  count_pairs(a, count);
  if (tid < moe::kMaxExperts && count[tid]) atomicAdd(&counters.count[tid], count[tid]);
  fence_gpu();
  __syncthreads();
  if (tid == 0) last = atomicInc(&counters.arrived, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  fence_gpu();
  int n = 0;
  if (tid < moe::kMaxExperts) {
    n = __ldcg(&counters.count[tid]);
    counters.count[tid] = 0;
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
  if (tid < moe::kMaxExperts) sort_cursors(a)[tid] = slots - n;
  const int even = tiles ? min(a.nmax, ((n + tiles - 1) / tiles + 7) / 8 * 8) : 0;
  for (int i = 0, off = 0; i < tiles; ++i, off += even)
    a.tiles[cells - tiles + i] = make_int4(tid, slots - n + off, max(0, min(even, n - off)), tiles > 1 || a.unpaired);
}

// Second launch: put each pair into one of its expert's slots; which one does not matter to any sum.
__global__ void __launch_bounds__(kSortThreads, 1) scatter_kernel(const __grid_constant__ Args a) {
  __shared__ int cursor[moe::kMaxExperts];
  const int tid = threadIdx.x, pairs = a.tokens * a.top_k, stride = gridDim.x * kSortThreads;
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  count_pairs(a, cursor);
  if (tid < moe::kMaxExperts && cursor[tid]) cursor[tid] = atomicAdd(sort_cursors(a) + tid, cursor[tid]);
  __syncthreads();
  for (int p = blockIdx.x * kSortThreads + tid; p < pairs; p += stride) {
    const int e = moe::local_expert(a, p), slot = e >= 0 ? atomicAdd(&cursor[e], 1) : -1;
    if (slot >= 0) a.sorted_pair[slot] = p;
    a.pair_slot[p] = slot;
  }
}

// Last launch: out[t] = sum of the token's weighted parts, in order; a warp sums one slab of one token. `factor` undoes
// what the weights' unpacking left out. A token's only pair has been weighed (w4a16_item.cuh).
__global__ void __launch_bounds__(256) sum_kernel(const __grid_constant__ Args a, float factor) {
  const int lane = threadIdx.x & 31, parts = a.top_k * a.splits2;
  const int t = blockIdx.x * 8 + (threadIdx.x >> 5), slab = blockIdx.y;
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (t >= a.tokens) return;
  const bool discard = moe::output_bytes(a) <= moe::kCachedOutputBytes;  // the parts should not reach memory
  __nv_bfloat16* from = static_cast<__nv_bfloat16*>(a.contrib) + (size_t)slab * a.tokens * parts * 256;
  float sum[8] = {};
  for (int c0 = 0; c0 < parts; c0 += 8) {
    // Lane i looks up part c0 + i.
    int row = -1;
    float weight = 0.f;
    if (lane < 8 && c0 + lane < parts) {
      const int pair = t * a.top_k + (c0 + lane) / a.splits2, slot = __ldcg(a.pair_slot + pair);
      weight = (a.top_k == 1 ? 1.f : __ldcg(a.topk_weights + pair)) * factor;
      if (slot >= 0) row = slot * a.splits2 + (c0 + lane) % a.splits2;
    }
    uint4 raw[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = __shfl_sync(0xffffffffu, row, i);
      raw[i] = r >= 0 ? __ldcs(reinterpret_cast<const uint4*>(from + (size_t)r * 256) + lane) : make_uint4(0, 0, 0, 0);
    }
    moe::add_parts(sum, raw, row, weight);
    __syncwarp();  // the parts are read; the next call writes them before it reads them
    const int r = __shfl_sync(0xffffffffu, row, lane >> 2);
    if (discard && r >= 0) discard_l2(from + (size_t)r * 256 + (lane & 3) * 64);
  }
  // A lane has rows 4a + 2h + b of 16, and those 64 further, as sum[4 * b + 2 * (+64) + h].
  __nv_bfloat16* out =
      static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + slab * 256 + (lane >> 4) * 128 + (lane & 15) * 4;
#pragma unroll
  for (int m = 0; m < 2; ++m)
    __stcs(reinterpret_cast<uint2*>(out + m * 64),
           make_uint2(pack_bf16(sum[2 * m], sum[4 + 2 * m]), pack_bf16(sum[2 * m + 1], sum[5 + 2 * m])));
}

}  // namespace w4a16
