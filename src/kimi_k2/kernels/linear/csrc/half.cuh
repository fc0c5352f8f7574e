// e4m3 weights times float16 on the tensor cores, for few tokens: e4m3 is float16 exactly, and so are bfloat16 values
// but for the smallest of 128 columns, which a power of two brings into float16's range.
//
// A step of a warp is two loads of 16 bytes a lane, each of 8 / SEGMENTS rows of SEGMENTS times 64 columns, so that
// whole lines are read. The MMA's 16 rows are the two loads' lanes, four lanes a row, with 64 columns each; its 8
// columns are 8 / SEGMENTS tokens, each with SEGMENTS times 64 columns in columns of its own. Where the segments agree
// the MMA is wanted, elsewhere it is not. The sum does not depend on the order of columns, so that a lane's 16
// bytes are what four MMAs take from it; more tokens take part in further MMAs.
#pragma once
#include "common/csrc/decode.cuh"

namespace decode {

// The power of two that brings `top`, the largest size of some values, to between 2^14 and 2^15, and its inverse.
// Values 2^28 times smaller than `top` then lose digits, 2^-40 of it.
__device__ __forceinline__ float half_scale(float top, float& inverse) {
  const int found = int(__float_as_uint(top) >> 23), exponent = found > 15 ? found : 15;
  inverse = __uint_as_float(uint32_t(exponent - 14) << 23);
  return __uint_as_float(uint32_t(268 - exponent) << 23);
}

template <int LANES>
__device__ __forceinline__ float max_lanes(float value) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(kAll, value, mask));
  return value;
}

// A lane's 8 of 128 columns, which 16 lanes share, as float16; `back` undoes their scale.
__device__ __forceinline__ uint4 to_halves(const float (&x)[8], float& back) {
  float top = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(x[i]));
  const float scale = half_scale(max_lanes<16>(top), back);
  uint4 halves;
#pragma unroll
  for (int i = 0; i < 4; ++i) (&halves.x)[i] = pack_half2(x[2 * i] * scale, x[2 * i + 1] * scale);
  return halves;
}

// Where a token's v-th group of 8 columns lies in shared memory: lanes of two segments read different banks.
__device__ __forceinline__ int half_place(int v) { return v ^ (v >> 3 & 1); }

template <int SEGMENTS>
struct Step {
  static_assert(SEGMENTS == 2 || SEGMENTS == 4 || SEGMENTS == 8, "");
  static constexpr int kTokens = 8 / SEGMENTS, kRows = 8 / SEGMENTS, kColumns = 64 * SEGMENTS;
  int group, quad, segment;  // four lanes a group
  __device__ Step() : group(threadIdx.x % 32 / 4), quad(threadIdx.x % 4), segment(group % SEGMENTS) {}

  // Of a load: the lane's row, its first column. Of an MMA: the token whose columns the lane gives.
  __device__ int row() const { return group / SEGMENTS; }
  __device__ int column() const { return segment * 64 + quad * 16; }
  __device__ int given() const { return group / SEGMENTS; }
  // Whether an MMA's sum in this lane is wanted, and of which token.
  __device__ bool wanted() const { return quad * 2 % SEGMENTS == segment / 2 * 2; }
  __device__ int token() const { return quad * 2 / SEGMENTS; }

  // The lane's part of a token's `step`-th columns.
  __device__ void take(const uint4* token, int step, uint4 (&x)[2]) const {
    const int v = (step * SEGMENTS + segment) * 8 + quad * 2, odd = segment & 1;
    x[0] = token[v + odd], x[1] = token[v + 1 - odd];
  }

  // Sums of the lane's two rows over the step's columns, with each of the given parts of tokens.
  template <int MMAS>
  __device__ void multiply(float (&sum)[MMAS][2], const uint4 low, const uint4 high, const uint4 (&x)[MMAS][2]) const {
    float d[MMAS][2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t l = (&low.x)[j], h = (&high.x)[j];
      const uint32_t a[4] = {fp8x2_to_half2(l & 0xffff), fp8x2_to_half2(h & 0xffff), fp8x2_to_half2(l >> 16),
                             fp8x2_to_half2(h >> 16)};
#pragma unroll
      for (int p = 0; p < MMAS; ++p)
        mma_f16(d[p][j % 2], a[0], a[1], a[2], a[3], (&x[p][j / 2].x)[j % 2 * 2], (&x[p][j / 2].x)[j % 2 * 2 + 1]);
    }
#pragma unroll
    for (int p = 0; p < MMAS; ++p)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        sum[p][h] = group % 2 ? d[p][0][2 * h + 1] + d[p][1][2 * h + 1] : d[p][0][2 * h] + d[p][1][2 * h];
  }

  // A row's sum over its segments, in all lanes that share its row and token.
  __device__ float whole(float value) const {
    value = wanted() ? value : 0.f;
    if (SEGMENTS > 2) value += __shfl_xor_sync(kAll, value, 1);
    if (SEGMENTS > 4) value += __shfl_xor_sync(kAll, value, 2);
#pragma unroll
    for (int mask = 4; mask < 4 * SEGMENTS; mask *= 2) value += __shfl_xor_sync(kAll, value, mask);
    return value;
  }
};

}  // namespace decode
