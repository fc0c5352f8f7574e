// Arguments of the products for a few tokens, and what they do with the tokens: residual sum and RMSNorm.
#pragma once
#include "decode_norm.cuh"

namespace decode {

struct LinearArguments {
    const __nv_bfloat16* x;
    const __nv_bfloat16* delta;
    const void* weight;
    const float* scale;  // null with bf16 weights
    const __nv_bfloat16* norm;
    __nv_bfloat16* out;
    __nv_bfloat16* total;  // x + delta, written by the first block
    int tokens, rows, columns;
    float eps;
};

// Tokens to shared memory, after the launches before this one; ends with a barrier. SPLIT: as `place_of` says.
template <int TOKENS, bool SPLIT>
__device__ __forceinline__ void prepare(const LinearArguments& a, uint4* token, float (&sums)[TOKENS][kWarps]) {
    const int thread = threadIdx.x, groups = a.columns / 8;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float sum = 0;
        for (int v = thread; v < groups; v += kThreads) {
            uint4 value = make_uint4(0, 0, 0, 0);
            if (t < a.tokens) {
                const int at = t * groups + v;
                value = __ldcg(reinterpret_cast<const uint4*>(a.x) + at);
                if (a.delta != nullptr) {
                    value = add8(value, __ldcg(reinterpret_cast<const uint4*>(a.delta) + at));
                    if (blockIdx.x == 0) reinterpret_cast<uint4*>(a.total)[at] = value;
                }
            }
            sum += squares8(value);
            token[t * groups + (SPLIT ? place_of(v, a.columns) : v)] = value;
        }
        if (a.norm != nullptr) {
            sum = sum_lanes(sum);
            if (thread % 32 == 0) sums[t][thread / 32] = sum;
        }
    }
    __syncthreads();
    if (a.norm == nullptr) return;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += sums[t][w];
        const float inverse = rsqrtf(sum / a.columns + a.eps);
        for (int v = thread; v < groups; v += kThreads) {
            uint4& value = token[t * groups + (SPLIT ? place_of(v, a.columns) : v)];
            value = normed8(value, inverse, __ldg(reinterpret_cast<const uint4*>(a.norm) + v));
        }
    }
    __syncthreads();
}

}  // namespace decode
