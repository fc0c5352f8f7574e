// The launches around the main one for many tokens: sort and quantize before it, sum after it.
#pragma once
#include "moe_fp8_item.cuh"

namespace moe {

// Prepared mode, first launch: block 0 sorts the pairs by expert, the others quantize the tokens.
__global__ void __launch_bounds__(1024, 1) prepare_kernel(const __grid_constant__ Fp8Args a) {
  __shared__ int count[kMaxExperts];
  __shared__ int warp_sum[32];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (blockIdx.x == 0) {
    const int pairs = a.tokens * a.top_k;
    if (tid < kMaxExperts) count[tid] = 0;
    __syncthreads();
#pragma unroll 4
    for (int p = tid; p < pairs; p += 1024) {
      const int e = local_expert(a, p);
      if (e >= 0) atomicAdd(&count[e], 1);
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
      int base = 0;
      for (int w = 0; w < warp; ++w) base += warp_sum[w];
      v += base;
      __syncthreads();
    }
    const int start = slots - n;
    if (tid == 1023) *a.num_tiles = cells;
    if (tid < kMaxExperts) count[tid] = start;
    const int even = tiles ? min(a.nmax, ((n + tiles - 1) / tiles + 7) / 8 * 8) : 0;
    for (int i = 0, off = 0; i < tiles; ++i, off += even)
      a.tiles[cells - tiles + i] = make_int4(tid, start + off, max(0, min(even, n - off)), 0);
    __syncthreads();
#pragma unroll 4
    for (int p = tid; p < pairs; p += 1024) {
      const int e = local_expert(a, p);
      if (e >= 0) a.sorted_pair[atomicAdd(&count[e], 1)] = p;
    }
  } else {
    // 16 threads a group of 128 values, 8 values a thread.
    const size_t total = (size_t)a.tokens * (a.hidden / 128) * 16;
    for (size_t i = (size_t)(blockIdx.x - 1) * 1024 + tid; i < total; i += (size_t)(gridDim.x - 1) * 1024) {
      const uint4 raw = __ldg(static_cast<const uint4*>(a.x) + i);
      float f[8];
      const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
      float m = 0.f;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&w[k]));
        f[2 * k] = u.x;
        f[2 * k + 1] = u.y;
        m = fmaxf(m, fmaxf(fabsf(u.x), fabsf(u.y)));
      }
#pragma unroll
      for (int d = 8; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d, 16));
      const float scale = group_scale(m), inv = 1.f / scale;
      static_cast<uint2*>(a.xq)[i] =
          make_uint2(pack_e4m3(f[0] * inv, f[1] * inv, f[2] * inv, f[3] * inv),
                     pack_e4m3(f[4] * inv, f[5] * inv, f[6] * inv, f[7] * inv));
      if ((i & 15) == 0) a.xs[i >> 4] = scale;
    }
    if (a.top_k * a.splits2 == 1)  // no summing launch: tokens without a valid pair are cleared here
      for (int t = blockIdx.x - 1; t < a.tokens; t += gridDim.x - 1)
        if (local_expert(a, t) < 0)
          for (int i = tid; i < a.hidden / 2; i += 1024)
            reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden)[i] = 0;
  }
}

// Prepared mode, last launch: out[t] = sum of the token's weighted parts, in order.
__global__ void __launch_bounds__(128) combine_kernel(const __grid_constant__ Fp8Args a) {
  const int t = blockIdx.x, col = (blockIdx.y * 128 + threadIdx.x) * 8;
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (col >= a.hidden) return;
  float acc[8] = {};
#pragma unroll 8
  for (int j = 0; j < a.top_k; ++j) {
    if (local_expert(a, t * a.top_k + j) < 0) continue;
    for (int c = 0; c < a.splits2; ++c) {
      const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(
          static_cast<const __nv_bfloat16*>(a.contrib) + ((size_t)(t * a.top_k + j) * a.splits2 + c) * a.hidden + col));
      const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&w[k]));
        acc[2 * k] += u.x;
        acc[2 * k + 1] += u.y;
      }
    }
  }
  *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + col) =
      make_uint4(pack_bf16(acc[0], acc[1]), pack_bf16(acc[2], acc[3]), pack_bf16(acc[4], acc[5]),
                 pack_bf16(acc[6], acc[7]));
}

}  // namespace moe
