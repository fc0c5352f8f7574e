// The noaux_tc gate: arguments, and the arithmetic that every strategy shares, so that they agree bit for bit.
#pragma once
#include <cuda_runtime.h>
#include <math_constants.h>
#include <stdint.h>

namespace gate {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kMaxTopK = 16;

struct GateArgs {
  const float* logits;   // [tokens, experts]
  const float* bias;     // [experts], for the choice only
  const int* num_valid;  // null, or one value: tokens from it on are padding
  void* indices;         // int32 or int64 [tokens, top_k]
  float* weights;        // [tokens, top_k]
  int tokens, experts, top_k, normalize, indices64, packed, warps, sm_count, programmatic;
  float scale;
};

// sigmoid(z) + bias from two special-function instructions; absolute error below 2e-7. No contraction: every strategy
// that recomputes a score must get the same bits.
__device__ __forceinline__ float choice_score(float z, float bias) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(z, -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(__fadd_rn(1.0f, e)));
  return __fadd_rn(s, bias);
}

// The sigmoid of a chosen expert: few are needed, so it is rounded well.
__device__ __forceinline__ float weight_score(float z) { return __frcp_rn(1.0f + expf(-z)); }

// Order-preserving map of float32 without NaN to unsigned, and back; NaN of either sign is given 0 by `sortable_nan`.
__device__ __forceinline__ uint32_t sortable(float v) {
  const int bits = __float_as_int(v);
  return bits ^ ((bits >> 31) | 0x80000000);
}
__device__ __forceinline__ float unsortable(uint32_t key) {
  return __int_as_float(key ^ (~(static_cast<int>(key) >> 31) | 0x80000000));
}
__device__ __forceinline__ uint32_t sortable_nan(float v) { return v == v ? sortable(v) : 0; }

__device__ __forceinline__ float tree_sum8(float4 a, float4 b) {
  return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// Weight of one chosen expert given the sum over the token's; 1e-20 as in the reference.
__device__ __forceinline__ float routing_weight(const GateArgs& a, float score, float sum) {
  return (a.normalize ? __fdiv_rn(score, sum + 1e-20f) : score) * a.scale;
}

__device__ __forceinline__ void store_choice(const GateArgs& a, int token, int rank, int expert, float weight) {
  const int64_t at = static_cast<int64_t>(token) * a.top_k + rank;
  if (a.indices64) static_cast<int64_t*>(a.indices)[at] = expert;
  else static_cast<int*>(a.indices)[at] = expert;
  a.weights[at] = weight;
}

// True if candidate (v, e) goes before (w, f): larger score, then lower expert.
__device__ __forceinline__ bool before(float v, int e, float w, int f) { return v > w || (v == w && e < f); }

}  // namespace gate
