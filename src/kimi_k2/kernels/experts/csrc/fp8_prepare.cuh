// The launches around the main one for many tokens: sort the pairs and quantize the tokens before it, sum after it.
#pragma once
#include "fp8_slab.cuh"

namespace moe {

constexpr int kBatch = 8;    // pairs of a thread in flight together
constexpr int kSorters = 8;  // blocks that sort

// Local experts of the pairs p, p + 1024, ...; -1 past the end.
__device__ __forceinline__ void local_experts(const Fp8Args& a, int p, int pairs, int (&e)[kBatch]) {
  long long id[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int pair = min(p + i * 1024, pairs - 1);
    id[i] = a.ids64 ? static_cast<const long long*>(a.topk_ids)[pair] : static_cast<const int*>(a.topk_ids)[pair];
    if (a.topk_weights[pair] == 0.f || p + i * 1024 >= pairs) id[i] = -1;
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const bool known = id[i] >= 0 && id[i] < a.num_global;
    e[i] = !known ? -1 : a.expert_map ? a.expert_map[id[i]] : static_cast<int>(id[i]);
    if (e[i] >= a.experts) e[i] = -1;
  }
}

// Prepared mode, first launch: the first blocks sort the pairs by expert, the others quantize the tokens. Every sorter
// counts all pairs, and puts those of its share of the experts into their slots: one SM's stores to
// scattered places are what took long.
__global__ void __launch_bounds__(1024, 1) prepare_kernel(const __grid_constant__ Fp8Args a) {
  __shared__ int count[kMaxExperts];
  __shared__ int warp_sum[32];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (blockIdx.x < kSorters) {
    const int pairs = a.tokens * a.top_k;
    if (blockIdx.x == 0 && tid < a.hidden / 256)
      a.count2[tid] = 0;  // fp8_slab.cuh counts a slab's halves of tiles there
    if (tid < kMaxExperts) count[tid] = 0;
    __syncthreads();
    int e[kBatch];
    for (int p = tid; p < pairs; p += kBatch * 1024) {
      local_experts(a, p, pairs, e);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (e[i] >= 0) atomicAdd(&count[e[i]], 1);
    }
    __syncthreads();
    const int n = tid < kMaxExperts ? count[tid] : 0;
    const int tiles = (n + a.nmax - 1) / a.nmax;
    int slots = n, cells = tiles;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      int& v = pass ? cells : slots;
      for (int d = 1; d < 32; d <<= 1) {
        const int u = __shfl_up_sync(0xffffffffu, v, d);
        if (lane >= d) v += u;
      }
      if (lane == 31) warp_sum[warp] = v;
      __syncthreads();
      int base = lane < warp ? warp_sum[lane] : 0;
#pragma unroll
      for (int d = 16; d; d >>= 1) base += __shfl_xor_sync(0xffffffffu, base, d);
      v += base;
      __syncthreads();
    }
    const int start = slots - n;
    if (tid == 1023 && blockIdx.x == 0) *a.num_tiles = cells;
    if (tid < kMaxExperts) count[tid] = start;
    // A wide tile's second warpgroup costs nothing where it has no tokens: whole tiles and a rest.
    const int even = !tiles || a.nmax >= kWideTokens ? a.nmax : min(a.nmax, ((n + tiles - 1) / tiles + 7) / 8 * 8);
    for (int i = 0, off = 0; blockIdx.x == 0 && i < tiles; ++i, off += even)
      a.tiles[cells - tiles + i] = make_int4(tid, start + off, max(0, min(even, n - off)), 0);
    __syncthreads();
    for (int p = tid; p < pairs; p += kBatch * 1024) {
      if (pairs > kBatch * 1024) local_experts(a, p, pairs, e);  // else they are known still
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int pair = p + i * 1024;
        const unsigned sorter = e[i] >= 0 ? e[i] % kSorters : 0;
        if (sorter != blockIdx.x || pair >= pairs) continue;
        const int slot = e[i] >= 0 ? atomicAdd(&count[e[i]], 1) : -1;
        if (slot >= 0) a.sorted_pair[slot] = pair;
        a.pair_slot[pair] = slot;
      }
    }
  } else {
    // 16 threads a group of 128 values, 8 values a thread.
    const size_t total = (size_t)a.tokens * (a.hidden / 128) * 16;
    const size_t stride = (size_t)(gridDim.x - kSorters) * 1024;
    for (size_t i0 = (size_t)(blockIdx.x - kSorters) * 1024 + tid; i0 < total; i0 += 4 * stride) {
      uint4 raw[4];
#pragma unroll
      for (int u = 0; u < 4; ++u)
        if (i0 + u * stride < total) raw[u] = load_written(static_cast<const uint4*>(a.x) + i0 + u * stride);
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const size_t i = i0 + u * stride;
        if (i >= total) break;
        float f[8];
        const uint32_t w[4] = {raw[u].x, raw[u].y, raw[u].z, raw[u].w};
        float m = 0.f;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&w[k]));
          f[2 * k] = v.x;
          f[2 * k + 1] = v.y;
          m = fmaxf(m, fmaxf(fabsf(v.x), fabsf(v.y)));
        }
#pragma unroll
        for (int d = 8; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d, 16));
        const float scale = group_scale(m), inv = 1.f / scale;
        static_cast<uint2*>(a.xq)[i] = make_uint2(pack_e4m3(f[0] * inv, f[1] * inv, f[2] * inv, f[3] * inv),
                                                  pack_e4m3(f[4] * inv, f[5] * inv, f[6] * inv, f[7] * inv));
        if ((i & 15) == 0) a.xs[i >> 4] = scale;
      }
    }
    if (a.top_k * a.splits2 == 1)  // no summing launch: tokens without a valid pair are cleared here, by a warp
      for (int t0 = (blockIdx.x - kSorters) * 1024 + warp * 32; t0 < a.tokens; t0 += (gridDim.x - kSorters) * 1024) {
        unsigned empty = __ballot_sync(0xffffffffu, t0 + lane < a.tokens && local_expert(a, t0 + lane) < 0);
        for (; empty; empty &= empty - 1) {
          uint4* row =
              reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)(t0 + __ffs(empty) - 1) * a.hidden);
          for (int i = lane; i < a.hidden / 8; i += 32) row[i] = make_uint4(0, 0, 0, 0);
        }
      }
  }
}

// Prepared mode, last launch where the main one does not sum: a warp sums every gridDim.y-th slab of one token. `WIDE`:
// the main launch was fp8_wide.cuh's. `discard`: see sum_slab.
// The slabs written last come first: they may still be in the L2.
template <bool WIDE>
__global__ void __launch_bounds__(256) combine_kernel(const __grid_constant__ Fp8Args a, const bool discard) {
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  const int t = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (t >= a.tokens) return;
  const Part first = find_part(a, t, 0);
  for (int slab = a.hidden / 256 - 1 - blockIdx.y; slab >= 0; slab -= gridDim.y)
    sum_slab<WIDE>(a, t, slab, first, discard);
}

}  // namespace moe
