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

// The quotient is rounded before the norm's weight is applied, as the plain norm does.
__device__ __forceinline__ uint4 normed8(const uint4 value, float inverse, const uint4 weight) {
  uint4 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = (&value.x)[i];
    reinterpret_cast<__nv_bfloat162*>(&out)[i] =
        __hmul2(__floats2bfloat162_rn(low(pair) * inverse, high(pair) * inverse),
                reinterpret_cast<const __nv_bfloat162*>(&weight)[i]);
  }
  return out;
}

__device__ __forceinline__ float squares8(const uint4 value) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = (&value.x)[i];
    sum += fmaf(low(pair), low(pair), high(pair) * high(pair));  // in the same order in every kernel
  }
  return sum;
}

}  // namespace decode
