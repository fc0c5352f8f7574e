// Parts of a context, weighed by their sums of exponentials, as GROUPS groups of threads add them up: each takes every
// GROUPS-th part, TOGETHER of them in flight; then the first group adds the others' sums. The order of the sums depends
// on GROUPS and TOGETHER alone.
#pragma once
#ifndef KIMI_K2_CUDA_ON_CPU
#include "common/csrc/ptx.cuh"
#endif

namespace mla {

template <int VALUES>
struct Gathered {
  float top = -INFINITY, total = 0, sum[VALUES] = {};

  // The group's parts. `sum_of(part)`: the base-2 logarithm of a part's sum of exponentials, and the power of two that
  // its values lack; `part_of(part)`: its values; `unpack(values, part)`.
  template <int GROUPS, int TOGETHER, class SumOf, class PartOf, class Unpack>
  __device__ __forceinline__ void take(int group, int parts, SumOf sum_of, PartOf part_of, Unpack unpack) {
    for (int base = group; base < parts; base += GROUPS * TOGETHER) {
      float2 log[TOGETHER];
      uint4 part[TOGETHER];
      float best = top;
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int split = base + i * GROUPS;
        log[i] = make_float2(-INFINITY, 0.f);
        if (split < parts) log[i] = sum_of(split), part[i] = part_of(split);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) best = fmaxf(best, log[i].x);
      const float own = top == -INFINITY ? 0.f : ptx::exp2_approximate(top - best);
      top = best, total *= own;
#pragma unroll
      for (int j = 0; j < VALUES; ++j) sum[j] *= own;
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if (log[i].x == -INFINITY) continue;
        const float share = ptx::exp2_approximate(log[i].x - top), weight = share * log[i].y;
        float values[VALUES];
        unpack(values, part[i]);
        total += share;
#pragma unroll
        for (int j = 0; j < VALUES; ++j) sum[j] += values[j] * weight;
      }
    }
  }

  // Groups but the first leave theirs in `others`: [GROUPS - 1][VALUES + 2][lanes].
  template <class Others>
  __device__ __forceinline__ void leave(Others& others, int group, int lane) const {
#pragma unroll
    for (int j = 0; j < VALUES; ++j) others[group - 1][j][lane] = sum[j];
    others[group - 1][VALUES][lane] = top, others[group - 1][VALUES + 1][lane] = total;
  }

  // The first group adds them to its own, in their order.
  template <int GROUPS, class Others>
  __device__ __forceinline__ void add(const Others& others, int lane) {
    float best = top;
#pragma unroll
    for (int one = 0; one < GROUPS - 1; ++one) best = fmaxf(best, others[one][VALUES][lane]);
    const float own = top == -INFINITY ? 0.f : ptx::exp2_approximate(top - best);
    top = best, total *= own;
#pragma unroll
    for (int j = 0; j < VALUES; ++j) sum[j] *= own;
#pragma unroll
    for (int one = 0; one < GROUPS - 1; ++one) {
      const float theirs = others[one][VALUES][lane];
      const float share = theirs == -INFINITY ? 0.f : ptx::exp2_approximate(theirs - best);
      total += share * others[one][VALUES + 1][lane];
#pragma unroll
      for (int j = 0; j < VALUES; ++j) sum[j] += share * others[one][j][lane];
    }
  }

  // A context of length zero has no parts and the result is zero.
  __device__ __forceinline__ void divide() {
    const float inverse = total > 0 ? 1.f / total : 0.f;
#pragma unroll
    for (int j = 0; j < VALUES; ++j) sum[j] *= inverse;
  }
};

}  // namespace mla
