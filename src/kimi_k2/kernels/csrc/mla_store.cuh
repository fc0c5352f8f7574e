// What a block writes: its part of the context, or the result where there is one part.
#pragma once
#include "mla_decode.cuh"

namespace mla {

// This warpgroup's 256 columns of the part, normalised.
__device__ __forceinline__ void store(const Arguments& a, const float (&acc)[2][64], int request, int split, int half,
                                      float total0, float total1) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int head = row + lower * 8;
    if (head >= a.heads) continue;
    const float inverse = 1.f / (lower ? total1 : total0);
    const int64_t place = int64_t(request) * a.heads + head;
    const int column = half * 256 + lane % 4 * 2;
    float* part = a.parts + (place * a.splits + split) * kLatent + column;
    __nv_bfloat16* out = a.out + place * kLatent + column;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int pair = i % 16 * 4 + lower * 2;
      const float x = acc[i / 16][pair] * inverse, y = acc[i / 16][pair + 1] * inverse;
      if (a.splits > 1)
        *reinterpret_cast<float2*>(part + i * 8) = make_float2(x, y);
      else
        *reinterpret_cast<uint32_t*>(out + i * 8) = moe::pack_bf16(x, y);
    }
  }
}

// A part without rows: its sum's logarithm is -inf and its values stay unwritten; the only part of a request is zero.
__device__ void store_empty(const Arguments& a, int request, int split) {
  const int64_t head0 = int64_t(request) * a.heads;
  if (a.splits > 1) {
    if (threadIdx.x < a.heads) a.sums[(head0 + threadIdx.x) * a.splits + split] = -INFINITY;
    return;
  }
  uint4* out = reinterpret_cast<uint4*>(a.out + head0 * kLatent);
  for (int i = threadIdx.x; i < a.heads * kLatent / 8; i += kThreads) out[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace mla
