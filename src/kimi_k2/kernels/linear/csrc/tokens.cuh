// Arguments of the GEMMs for a few tokens, and what they do with the tokens: residual sum and RMSNorm.
#pragma once
#include "rowwise/csrc/norm.cuh"

namespace decode {

struct LinearArguments {
  const __nv_bfloat16* x;
  const __nv_bfloat16* delta;
  const void* weight;
  const float* scale;  // null with bf16 weights
  const __nv_bfloat16* norm;
  __nv_bfloat16* out;
  __nv_bfloat16* total;  // x + delta, written by the first block or the first cluster's
  int tokens, rows, columns;
  int x_stride;  // values from one token to the next one
  float eps;
};

// Shared memory of a GEMM: the tokens, then the norm's weight.
template <int TOKENS, int COLUMNS>
constexpr size_t token_bytes() {
  return size_t(TOKENS + 1) * COLUMNS * 2;
}

// The norm's weight on its way to shared memory: it depends on no launch.
template <int TOKENS, int COLUMNS>
__device__ __forceinline__ void request_norm(const LinearArguments& a, uint4* token) {
  constexpr int kGroups = COLUMNS / 8;
  if (a.norm == nullptr) return;
  for (int v = threadIdx.x; v < kGroups; v += kThreads)
    cp_async_16(token + TOKENS * kGroups + v, reinterpret_cast<const uint4*>(a.norm) + v);
}

// Tokens to shared memory, after the launches before this one; ends with a barrier. With a norm they are multiplied by
// its weight, and sums over a token are yet to be multiplied by `inverse_norm`. SPLIT: as `place_of` says.
template <int TOKENS, int COLUMNS, bool SPLIT>
__device__ __forceinline__ void prepare(const LinearArguments& a, uint4* token, float (&sums)[TOKENS][kWarps]) {
  constexpr int kGroups = COLUMNS / 8, kEach = (kGroups + kThreads - 1) / kThreads;
  const int thread = threadIdx.x;
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    // All loads before the first use: their latencies would add up.
    uint4 value[kEach], delta[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int v = thread + i * kThreads, at = t * kGroups + v;
      const bool here = v < kGroups && t < a.tokens;
      const __nv_bfloat16* x = a.x + int64_t(t) * a.x_stride;
      value[i] = here ? __ldcg(reinterpret_cast<const uint4*>(x) + v) : make_uint4(0, 0, 0, 0);
      if (a.delta != nullptr)
        delta[i] = here ? __ldcg(reinterpret_cast<const uint4*>(a.delta) + at) : make_uint4(0, 0, 0, 0);
    }
    if (t == 0) cp_async_wait();  // a thread reads those of the norm's weights that it has asked for
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int v = thread + i * kThreads;
      if (v >= kGroups) continue;
      float wide[8];
      if (a.delta != nullptr) {
        sum8(value[i], delta[i], wide);
        value[i] = round8(wide);
        if (blockIdx.x == 0 && t < a.tokens) reinterpret_cast<uint4*>(a.total)[t * kGroups + v] = value[i];
      } else {
        widen(value[i], wide);
      }
      if (a.norm != nullptr) {
        sum += squares8(wide);
        value[i] = normed8(wide, 1.f, token[TOKENS * kGroups + v]);
      }
      token[t * kGroups + (SPLIT ? place_of(v, COLUMNS) : v)] = value[i];
    }
    if (a.norm != nullptr) {
      sum = sum_lanes(sum);
      if (thread % 32 == 0) sums[t][thread / 32] = sum;
    }
  }
  __syncthreads();
}

template <int COLUMNS>
__device__ __forceinline__ float inverse_norm(const LinearArguments& a, const float (&squares)[kWarps]) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += squares[w];
  return rsqrtf(sum / COLUMNS + a.eps);
}

}  // namespace decode
