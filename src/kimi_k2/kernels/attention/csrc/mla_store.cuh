// What a block of 32 heads and more writes: its part of the context, or the result where there is one part.
#pragma once
#include <cuda_fp16.h>

#include "mla.cuh"

namespace mla {

// Parts of 32 heads and more lie as the registers do, in float16 with a power of two for each head's half: half as many
// bytes as float32, and a relative error of 2^-12 where the result's own rounding has 2^-9. Sixteen bytes are eight
// columns of one head; those of a part are numbered [half][sixteen heads][32 columns][lower eight heads][lane]. With
// each head's half goes the logarithm of its sum and that power of two.
struct Slot {
  int half, head, column;
  __device__ Slot(int slot, int heads) {
    const int tile = slot / 512, lane = slot % 32;
    half = tile / (heads / 16);
    head = tile % (heads / 16) * 16 + slot / 32 % 2 * 8 + lane / 4;
    column = half * 256 + slot % 512 / 64 * 32 + lane % 4 * 2;  // and the next, and so on in steps of eight
  }
};

__device__ __forceinline__ void store_part(const Arguments& a, const float (&acc)[2][64], int64_t part, int half,
                                           int lower, float top, float total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  float peak = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int pair = i % 16 * 4 + lower * 2;
    peak = fmaxf(peak, fmaxf(fabsf(acc[i / 16][pair]), fabsf(acc[i / 16][pair + 1])));
  }
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
  // The largest comes to lie in [2^14, 2^15): 268 = 127 + 127 + 14.
  const float inverse = a.value_scale / total;
  const int exponent = min(max(__float_as_int(peak * inverse) >> 23, 30), 254);
  const float factor = inverse * __int_as_float((268 - exponent) << 23);
  uint4* place =
      static_cast<uint4*>(a.parts) + part * a.heads * 64 + ((half * (a.heads / 16) + warp) * 16 + lower) * 32 + lane;
#pragma unroll
  for (int columns = 0; columns < 8; ++columns) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = columns * 4 + j, pair = i % 16 * 4 + lower * 2;
      const __half2 both = __floats2half2_rn(acc[i / 16][pair] * factor, acc[i / 16][pair + 1] * factor);
      words[j] = *reinterpret_cast<const uint32_t*>(&both);
    }
    place[columns * 64] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  if (lane % 4 == 0)
    reinterpret_cast<float2*>(a.sums)[(part * 2 + half) * a.heads + warp * 16 + lower * 8 + lane / 4] =
        make_float2(top + log2f(total), __int_as_float((exponent - 14) << 23));
}

// Four lanes' words, as in a matrix of a word in each lane's place, across its diagonal.
__device__ __forceinline__ void transpose_four(uint32_t (&word)[4]) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & mask) continue;
      const bool upper = lane & mask;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? word[i] : word[i | mask], mask);
      if (upper) word[i] = got;
      else word[i | mask] = got;
    }
}

// This warpgroup's 256 columns, normalised.
template <bool PLANNED>
__device__ __forceinline__ void store(const Arguments& a, const float (&acc)[2][64], const Work<PLANNED>& work,
                                      int half, const float (&top)[2], const float (&total)[2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  if (warp * 16 >= a.heads) return;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    if (!work.alone(a)) {
      store_part(a, acc, work.slot(a), half, lower, top[lower], total[lower]);
      continue;
    }
    const float inverse = total[lower] > 0 ? a.value_scale / total[lower] : 0.f;  // 0: the token sees no row
    const int64_t head = int64_t(work.request) * a.heads + warp * 16 + lower * 8 + lane / 4;
    if (half == 0 && lane % 4 == 0) store_lse(a, head, top[lower] + log2f(total[lower]));
    __nv_bfloat16* out = a.out + head * kLatent + half * 256 + lane % 4 * 8;
#pragma unroll
    for (int columns = 0; columns < 8; ++columns) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = columns * 4 + j, pair = i % 16 * 4 + lower * 2;
        words[j] = pack_bf16(acc[i / 16][pair] * inverse, acc[i / 16][pair + 1] * inverse);
      }
      transpose_four(words);
      *reinterpret_cast<uint4*>(out + columns * 32) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// A part without rows: its sums' logarithms are -inf and its values stay unwritten; the only part of a request is zero.
__device__ void store_nothing(const Arguments& a, const Work<false>& work) {
  if (!work.alone(a)) {
    if (threadIdx.x < 2 * a.heads)
      reinterpret_cast<float2*>(a.sums)[work.slot(a) * 2 * a.heads + threadIdx.x] = make_float2(-INFINITY, 0.f);
    return;
  }
  uint4* out = reinterpret_cast<uint4*>(a.out + int64_t(work.request) * a.heads * kLatent);
  for (int i = threadIdx.x; i < a.heads * kLatent / 8; i += blockDim.x) out[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < a.heads) store_lse(a, int64_t(work.request) * a.heads + threadIdx.x, -INFINITY);
}

}  // namespace mla
