// RMSNorm and the residual sum before it, on groups of 8 bf16 values.
#pragma once
#include "common/csrc/decode.cuh"

namespace decode {

__device__ __forceinline__ uint4 add8(const uint4 a, const uint4 b) {
  uint4 sum;
  const __nv_bfloat162 *p = reinterpret_cast<const __nv_bfloat162*>(&a),
                       *q = reinterpret_cast<const __nv_bfloat162*>(&b);
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<__nv_bfloat162*>(&sum)[i] = __hadd2(p[i], q[i]);
  return sum;
}

// The sum before rounding. A norm of it has one rounding less than one of `round8`, which is the residual that is kept.
__device__ __forceinline__ void sum8(const uint4 a, const uint4 b, float (&sum)[8]) {
  float added[8];
  widen(a, sum);
  widen(b, added);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += added[i];
}

__device__ __forceinline__ uint4 round8(const float (&value)[8]) {
  uint4 out;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    reinterpret_cast<__nv_bfloat162*>(&out)[i] = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
  return out;
}

// Rounded once: the plain norm rounds the quotient before its weight is applied, too.
__device__ __forceinline__ uint4 normed8(const float (&value)[8], float inverse, const uint4 weight) {
  float w[8], out[8];
  widen(weight, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = value[i] * inverse * w[i];
  return round8(out);
}

__device__ __forceinline__ uint4 normed8(const uint4 value, float inverse, const uint4 weight) {
  float wide[8];
  widen(value, wide);
  return normed8(wide, inverse, weight);
}

__device__ __forceinline__ float squares8(const float (&value)[8]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum += fmaf(value[2 * i], value[2 * i], value[2 * i + 1] * value[2 * i + 1]);  // in the same order in every kernel
  return sum;
}

__device__ __forceinline__ float squares8(const uint4 value) {
  float wide[8];
  widen(value, wide);
  return squares8(wide);
}

}  // namespace decode
