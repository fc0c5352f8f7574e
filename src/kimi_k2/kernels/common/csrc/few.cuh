// What gives a few tokens the bits of many (experts/csrc/fp8_few.cu).
//
// The sums of a block of 128 columns are the matrix instructions' alone; in which order such sums are added is what a
// GEMM of many tokens fixes. So one instruction's 64 rows are 8 rows of W by 8 blocks of their columns, row after row
// (or 16 by 4, or 32 by 2), and its tokens' 8 columns are blocks of one token: of what it makes, the sums of a row's
// and a token's block with the same number are wanted. No block of threads shares a row with another one.
#pragma once
#include "launch.cuh"
#include "quantize.cuh"
#include "wgmma.cuh"

namespace few {

using namespace ptx;

constexpr int kUnitBytes = 64 * 128;  // of W: rows by blocks of columns, 64 of both together
constexpr int kAtomBytes = 1024;      // of tokens: eight blocks of columns

// Where in its atom the `v`-th eight values of block of columns `block` lie, of sixteen times eight.
__device__ __forceinline__ int place_of(int block, int v) {
  const int row = block % 8;
  return row * 128 + ((v / 2) ^ row) * 16 + v % 2 * 8;
}

// d (+)= a unit by an atom of each of TOKENS tokens, `step` bytes apart.
template <int TOKENS>
__device__ __forceinline__ void multiply(float (&d)[4 * TOKENS], const unsigned char* w, const unsigned char* x,
                                         uint32_t step, bool more) {
  const uint64_t left = desc_sw128(smem_u32(w)), right = descriptor(smem_u32(x), 16, step);
#pragma unroll
  for (int j = 0; j < 4; ++j) WgmmaE4m3<8 * TOKENS>::go(d, left + 2 * j, right + 2 * j, more || j > 0);
}
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned char* w, const unsigned char* x, bool more) {
  multiply<1>(d, w, x, kAtomBytes, more);
}

// A lane has rows g and g + 8 of its warp's 16 and columns 2 q, 2 q + 1 of an atom's: whether one of these is `column`.
__device__ __forceinline__ bool pick(const float* sum, int column, float (&two)[2]) {
  two[0] = column % 2 ? sum[1] : sum[0], two[1] = column % 2 ? sum[3] : sum[2];
  return threadIdx.x % 4 == column / 2;
}

// The sums of `blocks` blocks of columns times their factors, in `parts` parts, each from its first block on; then the
// parts: block_gemm.cuh's order.
__device__ __forceinline__ float sum_parts(const float* product, int step, const float* factor, int factor_step,
                                           int blocks, int parts) {
  float whole = 0.f;
  for (int part = 0, kb = 0; part < parts; ++part) {
    const int end = (part + 1) * blocks / parts;
    float some = 0.f;
#pragma unroll 14
    for (; kb < end; ++kb) some = fmaf(product[kb * step], factor[kb * factor_step], some);
    whole = parts == 1 ? some : whole + some;
  }
  return whole;
}

}  // namespace few
