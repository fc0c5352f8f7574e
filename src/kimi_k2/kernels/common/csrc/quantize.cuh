// e4m3 groups of 128 values with one float32 scale.
#pragma once
#include "ptx.cuh"

namespace ptx {

__device__ __forceinline__ float group_scale(float amax) { return fmaxf(amax, 1e-10f) / 448.f; }

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  return to_e4m3(a, b) | to_e4m3(c, d) << 16;
}

// Eight of a group's values, that the 16 threads of an aligned half warp hold together: their e4m3 values, and the
// group's scale in every one of the threads.
__device__ __forceinline__ uint2 quantize_eight(const float (&value)[8], float& scale) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(value[i]));
#pragma unroll
  for (int d = 8; d; d >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d, 16));
  scale = group_scale(most);
  const float inverse = 1.f / scale;
  return make_uint2(pack_e4m3(value[0] * inverse, value[1] * inverse, value[2] * inverse, value[3] * inverse),
                    pack_e4m3(value[4] * inverse, value[5] * inverse, value[6] * inverse, value[7] * inverse));
}

// What the e4m3 values of `quantize_eight` leave of the eight, by the same scale. It is a sixteenth at most, and
// subnormals are 2^-9 of a scale by which the group's largest value is 448: together they hold bf16's bits.
__device__ __forceinline__ uint2 quantize_rest(const float (&value)[8], float scale, uint2 fp8) {
  const float inverse = 1.f / scale;
  float rest[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 held = from_e4m3(((i < 2 ? fp8.x : fp8.y) >> (i % 2 * 16)) & 0xffff);
    rest[2 * i] = fmaf(value[2 * i], inverse, -held.x);
    rest[2 * i + 1] = fmaf(value[2 * i + 1], inverse, -held.y);
  }
  return make_uint2(pack_e4m3(rest[0], rest[1], rest[2], rest[3]), pack_e4m3(rest[4], rest[5], rest[6], rest[7]));
}

}  // namespace ptx
