// Router GEMM for few tokens, and with the gate behind it in the same launch.
//
// logits[T, E] = x[T, H] W[E, H]^T in bfloat16 products and float32 sums. A cluster of eight blocks owns 16 * MT experts
// and splits H; each warp takes steps of 32 columns straight from memory into the fragments of mma.m16n8k16. The sum
// over H does not depend on the order of columns, so a lane's 16 contiguous bytes serve as the fragments of two products.
// Sums go over warps, then over the cluster's blocks, in a fixed order. With the gate, the cluster that finishes last
// routes all tokens.
#pragma once
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include "gate_warp.cuh"

namespace gate {

constexpr int kSplits = 8;  // blocks of a cluster
constexpr int kStep = 32;   // columns that a warp takes at a time
constexpr int kRouterWarps = 7;
constexpr int kDepth = 4;   // steps whose weights are in flight together; 7 * 4 * 8 steps are the model's 7168 columns

struct RouterArgs {
  GateArgs gate;            // logits is the output of the product; the gate's other fields only if fused
  const __nv_bfloat16* x;   // [tokens, hidden]
  const __nv_bfloat16* weight;  // [experts, hidden]
  float* logits;            // [tokens, experts]
  unsigned* arrivals;       // zero before the first launch; wraps to zero by itself
  int hidden, fused;
};

__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int MT, int NT>
struct RouterSmem {
  union {
    float partial[kRouterWarps][8 * NT][16 * MT + 4];
    WarpScratch gate[kRouterWarps];
  };
  float block_sum[8 * NT * 16 * MT];
  int last;
};

template <int MT, int NT>
__global__ void __launch_bounds__(kRouterWarps * 32, 1) __cluster_dims__(kSplits, 1, 1) router_kernel(RouterArgs a) {
  namespace cg = cooperative_groups;
  extern __shared__ __align__(16) unsigned char raw[];
  auto& smem = *reinterpret_cast<RouterSmem<MT, NT>*>(raw);
  cg::cluster_group cluster = cg::this_cluster();
  const int split = cluster.block_rank(), tile = blockIdx.x / kSplits;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quad = lane & 3;
  const int columns = a.hidden / kSplits, tokens = a.gate.tokens, experts = a.gate.experts;
  const int64_t first = static_cast<int64_t>(split) * columns + 8 * quad;
  const __nv_bfloat16* weight = a.weight + static_cast<int64_t>(tile * 16 * MT + row) * a.hidden + first;
  const __nv_bfloat16* x = a.x + static_cast<int64_t>(row) * a.hidden + first;
  cudaTriggerProgrammaticLaunchCompletion();

  float acc[MT][NT][4] = {};
  for (int base = warp * kStep; base < columns; base += kRouterWarps * kDepth * kStep) {
    uint4 w[kDepth][2 * MT];
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int k = base + d * kRouterWarps * kStep;
#pragma unroll
      for (int r = 0; r < 2 * MT; ++r) {
        w[d][r] = make_uint4(0, 0, 0, 0);
        if (k < columns) w[d][r] = __ldg(reinterpret_cast<const uint4*>(weight + static_cast<int64_t>(8 * r) * a.hidden + k));
      }
    }
    cudaGridDependencySynchronize();  // weights are constant, tokens are not
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int k = base + d * kRouterWarps * kStep;
      if (k >= columns) break;
      uint4 t[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        t[n] = make_uint4(0, 0, 0, 0);
        if (8 * n + row < tokens) t[n] = __ldcg(reinterpret_cast<const uint4*>(x + static_cast<int64_t>(8 * n) * a.hidden + k));
      }
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          const uint4 lo = w[d][2 * m], hi = w[d][2 * m + 1];
          mma_bf16(acc[m][n], lo.x, hi.x, lo.y, hi.y, t[n].x, t[n].y);
          mma_bf16(acc[m][n], lo.z, hi.z, lo.w, hi.w, t[n].z, t[n].w);
        }
    }
  }
  cudaGridDependencySynchronize();  // also for warps without a step
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) smem.partial[warp][8 * n + 2 * quad + (i & 1)][16 * m + row + 8 * (i >> 1)] = acc[m][n][i];
  __syncthreads();
  const int outputs = tokens * 16 * MT;
  for (int i = threadIdx.x; i < outputs; i += kRouterWarps * 32) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kRouterWarps; ++w) sum += smem.partial[w][i / (16 * MT)][i % (16 * MT)];
    smem.block_sum[i] = sum;
  }
  cluster.sync();
  for (int i = split * kRouterWarps * 32 + threadIdx.x; i < outputs; i += kSplits * kRouterWarps * 32) {
    float part[kSplits], sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) part[s] = cluster.map_shared_rank(smem.block_sum, s)[i];
#pragma unroll
    for (int s = 0; s < kSplits; ++s) sum += part[s];
    a.logits[static_cast<int64_t>(i / (16 * MT)) * experts + tile * 16 * MT + i % (16 * MT)] = sum;
  }
  cluster.sync();  // the others' sums have been read and their logits written
  if (!a.fused) return;

  if (split == 0 && threadIdx.x == 0) {
    __threadfence();
    const unsigned clusters = gridDim.x / kSplits;
    const int last = atomicInc(a.arrivals, clusters - 1) == clusters - 1;
    __threadfence();
    for (int s = 0; s < kSplits; ++s) *cluster.map_shared_rank(&smem.last, s) = last;
  }
  cluster.sync();
  if (!smem.last) return;
  constexpr int kValues = 12;
  float bias[kValues], z[kValues];
  load_row<kValues>(a.gate.bias, experts, lane, bias);
  for (int token = warp * kSplits + split; token < tokens; token += kSplits * kRouterWarps) {
    if (a.gate.num_valid != nullptr && token >= *a.gate.num_valid) {
      store_padding(a.gate, token, lane);
      continue;
    }
    load_row<kValues>(a.logits + static_cast<int64_t>(token) * experts, experts, lane, z);
    gate_token<kValues>(a.gate, z, bias, token, smem.gate[warp], lane);
    __syncwarp();
  }
}

}  // namespace gate
