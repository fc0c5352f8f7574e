// Router GEMM for few tokens, and with the gate behind it in the same launch.
//
// logits[T, E] = x[T, H] W[E, H]^T in bfloat16 products and float32 sums. A cluster of eight blocks owns 16 * MT
// experts and splits H; each warp takes steps of 32 columns straight from memory into the fragments of mma.m16n8k16.
// The sum over H does not depend on the order of columns, so a lane's 16 contiguous bytes serve as the fragments of two
// MMAs. Each block sums its warps and sends the sums of token t to block t % 8 of the cluster, which adds the eight
// in their order. With the gate, the blocks of the first cluster route their tokens as soon as all logits are there:
// each logit is its own flag, a NaN that no arithmetic produces until it is written. That saves a fence, an atomic
// counter and the wait for both; it needs all blocks resident at once, which the caller makes sure of.
//
// NORMED: x is the residual and the GEMM is of RMSNorm(x + delta). The norm's quotient is applied to the finished
// sums, so that the GEMM need not wait for it: the blocks' sums of squares travel with their parts of the GEMM.
// The second cluster writes the residual sum and its norm.
#pragma once
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include "common/csrc/ptx.cuh"
#include "gate_warp.cuh"
#include "rowwise/csrc/norm.cuh"

namespace gate {

constexpr int kSplits = 8;  // blocks of a cluster
constexpr int kStep = 32;   // columns that a warp takes at a time
constexpr int kRouterWarps = 7;
constexpr int kDepth = 4;  // steps whose weights are in flight together; 7 * 4 * 8 steps are the model's 7168 columns

struct RouterArgs {
  GateArgs gate;                // but for tokens, experts and programmatic used only if fused; its logits never
  const __nv_bfloat16* x;       // [tokens, hidden]
  const __nv_bfloat16* weight;  // [experts, hidden]
  float* logits;                // [tokens, experts]; if fused all absent before the launch, and again after it
  const __nv_bfloat16* delta;   // null, or [tokens, hidden], with a norm before the GEMM
  const __nv_bfloat16* norm;    // [hidden]
  __nv_bfloat16* total;         // [tokens, hidden], x + delta
  __nv_bfloat16* normed;        // [tokens, hidden]
  const float* inverse;         // null, or [tokens]: of a norm whose quotient x lacks (route_norm.cuh)
  int hidden, fused;            // fused: the gate follows in the same launch
  float eps;
};

// A logit that has not been written yet: a NaN whose bits no arithmetic produces.
constexpr unsigned kAbsent = 0xffffffffu;

__device__ __forceinline__ void store_relaxed(float* at, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
}

// load_row of a row that other blocks are still writing: waits until all of it is there, and leaves it absent again.
template <int VALUES>
__device__ __forceinline__ void take_row(float* row, int experts, int lane, float (&value)[VALUES]) {
  bool waiting;
  do {
    waiting = false;
#pragma unroll
    for (int c = 0; c < VALUES / 4; ++c) {
      const int e = c * 128 + lane * 4;
      uint4 q = make_uint4(0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff);
      if (e < experts)
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w)
                     : "l"(row + e)
                     : "memory");
      waiting |= q.x == kAbsent || q.y == kAbsent || q.z == kAbsent || q.w == kAbsent;
      value[4 * c] = __uint_as_float(q.x), value[4 * c + 1] = __uint_as_float(q.y);
      value[4 * c + 2] = __uint_as_float(q.z), value[4 * c + 3] = __uint_as_float(q.w);
    }
  } while (__any_sync(kAll, waiting));
#pragma unroll
  for (int c = 0; c < VALUES / 4; ++c) {
    const int e = c * 128 + lane * 4;
    if (e < experts) *reinterpret_cast<uint4*>(row + e) = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
  }
}

template <int MT, int NT>
struct RouterSmem {
  union {
    float partial[kRouterWarps][8 * NT][16 * MT + 4];
    WarpScratch gate[kRouterWarps];  // once the partial sums have been sent
  };
  float sums[kSplits][NT][16 * MT];  // by sender; this block's tokens
  float squares[kRouterWarps][8], all_squares[kSplits][8];
  alignas(8) uint64_t gathered;  // once all sums of this block's tokens are here
};

__device__ __forceinline__ float inverse_norm(const RouterArgs& a, int token, const float (&all_squares)[kSplits][8]) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSplits; ++s) sum += all_squares[s][token];
  return rsqrtf(sum / a.hidden + a.eps);
}

// Fragments of DEPTH steps from column k on: rows 8 * r + lane / 4 below `rows`; zeros elsewhere.
template <int DEPTH, int ROWS, bool CONSTANT>
__device__ __forceinline__ void load_steps(const __nv_bfloat16* from, int hidden, int k, int columns, int rows, int row,
                                           uint4 (&to)[DEPTH][ROWS]) {
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int column = k + d * kRouterWarps * kStep;
      const uint4* at = reinterpret_cast<const uint4*>(from + static_cast<int64_t>(8 * r) * hidden + column);
      to[d][r] = make_uint4(0, 0, 0, 0);
      if (column < columns && 8 * r + row < rows) to[d][r] = CONSTANT ? decode::load_early(at) : __ldcg(at);
    }
}

// The second cluster's part of the residual sum and of its norm: this block's columns.
__device__ __forceinline__ void store_normed(const RouterArgs& a, int split, const float (&all_squares)[kSplits][8]) {
  const int groups = a.hidden / kSplits / 8;
  for (int i = threadIdx.x; i < groups * a.gate.tokens; i += kRouterWarps * 32) {
    const int token = i / groups, v = split * groups + i % groups;
    const int64_t at = static_cast<int64_t>(token) * (a.hidden / 8) + v;
    float total[8];
    decode::sum8(__ldcg(reinterpret_cast<const uint4*>(a.x) + at), __ldcg(reinterpret_cast<const uint4*>(a.delta) + at),
                 total);
    reinterpret_cast<uint4*>(a.total)[at] = decode::round8(total);
    reinterpret_cast<uint4*>(a.normed)[at] =
        decode::normed8(total, inverse_norm(a, token, all_squares), __ldg(reinterpret_cast<const uint4*>(a.norm) + v));
  }
}

// RESIDENT blocks of an SM: with room for two launches' blocks, the next one fetches its weights early.
template <int MT, int NT, int RESIDENT, bool FUSED, bool NORMED>
__global__ void __launch_bounds__(kRouterWarps * 32, RESIDENT) __cluster_dims__(kSplits, 1, 1)
    router_kernel(RouterArgs a) {
  namespace cg = cooperative_groups;
  constexpr int kTokenDepth = NT <= 2 ? kDepth : MT * NT <= 8 ? 2 : 1;  // steps whose tokens are in flight together
  extern __shared__ __align__(16) unsigned char raw[];
  auto& smem = *reinterpret_cast<RouterSmem<MT, NT>*>(raw);
  cg::cluster_group cluster = cg::this_cluster();
  const int split = cluster.block_rank(), tile = blockIdx.x / kSplits;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quad = lane & 3;
  const int columns = a.hidden / kSplits, tokens = a.gate.tokens, experts = a.gate.experts;
  const int mine = (tokens - split + kSplits - 1) / kSplits;  // tokens split, split + 8, ...
  if (threadIdx.x == 0) {
    ptx::mbar_init(&smem.gathered, 1);
    ptx::fence_mbar_init();
    ptx::mbar_arrive_expect_tx(&smem.gathered, kSplits * (mine * 16 * MT + (NORMED ? 8 : 0)) * 4);
  }
  decode::cluster_begin();
  const int64_t first = static_cast<int64_t>(split) * columns + 8 * quad;
  const __nv_bfloat16* weight = a.weight + static_cast<int64_t>(tile * 16 * MT + row) * a.hidden + first;
  const __nv_bfloat16* x = a.x + static_cast<int64_t>(row) * a.hidden + first;
  cudaTriggerProgrammaticLaunchCompletion();

  static_assert(!NORMED || (NT == 1 && FUSED), "one lane holds a token's values of a step");
  float acc[MT][NT][4] = {}, squares = 0.0f;
  for (int base = warp * kStep; base < columns; base += kRouterWarps * kDepth * kStep) {
    uint4 w[kDepth][2 * MT];
    load_steps<kDepth, 2 * MT, true>(weight, a.hidden, base, columns, 16 * MT, row, w);
    uint4 norm[NORMED ? kDepth : 1][1], delta[NORMED ? kDepth : 1][1];
    if constexpr (NORMED) load_steps<kDepth, 1, true>(a.norm + first, a.hidden, base, columns, tokens, row, norm);
    cudaGridDependencySynchronize();  // weights are constant, tokens are not
#pragma unroll
    for (int part = 0; part < kDepth; part += kTokenDepth) {
      uint4 t[kTokenDepth][NT];
      load_steps<kTokenDepth, NT, false>(x, a.hidden, base + part * kRouterWarps * kStep, columns, tokens, row, t);
      if constexpr (NORMED) {
        const __nv_bfloat16* added = a.delta + static_cast<int64_t>(row) * a.hidden + first;
        load_steps<kDepth, 1, false>(added, a.hidden, base, columns, tokens, row, delta);
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          float total[8];
          decode::sum8(t[d][0], delta[d][0], total);
          squares += decode::squares8(total);
          t[d][0] = decode::normed8(total, 1.0f, norm[d][0]);
        }
      }
#pragma unroll
      for (int d = 0; d < kTokenDepth; ++d)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            const uint4 lo = w[part + d][2 * m], hi = w[part + d][2 * m + 1];
            ptx::mma_bf16(acc[m][n], lo.x, hi.x, lo.y, hi.y, t[d][n].x, t[d][n].y);
            ptx::mma_bf16(acc[m][n], lo.z, hi.z, lo.w, hi.w, t[d][n].z, t[d][n].w);
          }
    }
  }
  cudaGridDependencySynchronize();  // also for warps without a step
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        smem.partial[warp][8 * n + 2 * quad + (i & 1)][16 * m + row + 8 * (i >> 1)] = acc[m][n][i];
  if constexpr (NORMED) {
    squares = decode::sum_lanes<4>(squares);
    if (quad == 0) smem.squares[warp][row] = squares;
  }
  __syncthreads();
  decode::cluster_wait();  // the receivers have begun, so their shared memory is theirs
  for (int i = threadIdx.x; i < tokens * 16 * MT; i += kRouterWarps * 32) {
    const int token = i / (16 * MT), column = i % (16 * MT);
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kRouterWarps; ++w) sum += smem.partial[w][token][column];
    ptx::store_remote(&smem.sums[split][token / kSplits][column], token % kSplits, sum, &smem.gathered);
  }
  if (NORMED && threadIdx.x < 8 * kSplits) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kRouterWarps; ++w) sum += smem.squares[w][threadIdx.x % 8];
    ptx::store_remote(&smem.all_squares[split][threadIdx.x % 8], threadIdx.x / 8, sum, &smem.gathered);
  }
  ptx::mbar_wait(&smem.gathered, 0);
  for (int i = threadIdx.x; i < mine * 16 * MT; i += kRouterWarps * 32) {
    const int slot = i / (16 * MT), column = i % (16 * MT);
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) sum += smem.sums[s][slot][column];
    if constexpr (NORMED) sum *= inverse_norm(a, slot * kSplits + split, smem.all_squares);
    else if (a.inverse != nullptr) sum *= __ldcg(a.inverse + slot * kSplits + split);
    store_relaxed(a.logits + static_cast<int64_t>(slot * kSplits + split) * experts + tile * 16 * MT + column, sum);
  }
  if (NORMED && tile == 1) store_normed(a, split, smem.all_squares);
  if (!FUSED || tile > 0) return;
  __syncthreads();  // all partial sums have been read, whose place the gate takes

  constexpr int kValues = 12;
  float bias[kValues], z[kValues];
  load_row<kValues>(a.gate.bias, experts, lane, bias);
  for (int slot = warp; slot < mine; slot += kRouterWarps) {
    const int token = slot * kSplits + split;
    take_row<kValues>(a.logits + static_cast<int64_t>(token) * experts, experts, lane, z);
    if (a.gate.num_valid != nullptr && token >= *a.gate.num_valid) store_padding(a.gate, token, lane);
    else gate_token<kValues>(a.gate, z, bias, token, smem.gate[warp], lane);
    __syncwarp();
  }
}

}  // namespace gate
