// A GEMM of one or two bf16 tokens in dense_gemm.cuh's order of sums, by one warpgroup. The 64 rows of an instruction
// are 64 / PARTS rows of W by all parts of their columns; of what it makes, the sums of a row's and a token's part with
// the same number are wanted. Units of 64 rows by 64 columns of the left operand come through a ring; all of the tokens
// lies in shared memory, N rows (parts of the columns times tokens) of 64 columns after the other.
#pragma once
#include "wgmma.cuh"

namespace few_bf16 {

using namespace ptx;

constexpr int kUnitBytes = 64 * 128;

// One thread: the ring's barriers, and the first units. `request(i)` asks for unit i.
template <class Request>
__device__ __forceinline__ void open_ring(uint64_t* full, uint64_t* empty, int ring, int units, Request request) {
  for (int i = 0; i < ring; ++i) mbar_init(&full[i], 1), mbar_init(&empty[i], 4);
  fence_mbar_init();
  for (int i = 0; i < min(ring, units); ++i) request(i);
}

// One thread: the others, as their places become free.
template <class Request>
__device__ __forceinline__ void feed_ring(uint64_t* empty, int ring, int units, Request request) {
  for (int i = ring; i < units; ++i) {
    mbar_wait(&empty[i % ring], (i / ring - 1) & 1);
    request(i);
  }
}

// Eight values of the right operand: the `at`-th eight of a part's columns, row `row`.
template <int N>
__device__ __forceinline__ void put_eight(unsigned char* tokens, int at, int row, const uint4 value) {
  *reinterpret_cast<uint4*>(tokens + at / 8 * (N * 128) + row * 128 + ((at % 8) ^ (row % 8)) * 16) = value;
}

// The sums of all units by the tokens, in a warpgroup's registers.
template <int N>
__device__ __forceinline__ void multiply_units(float (&acc)[N / 2], const unsigned char* weights,
                                               const unsigned char* tokens, uint64_t* full, uint64_t* empty, int ring,
                                               int units) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < units; ++i) {
    const int st = i % ring;
    mbar_wait(&full[st], i / ring & 1);
    const uint64_t left = desc_sw128(smem_u32(weights + st * kUnitBytes)),
                   right = desc_sw128(smem_u32(tokens + i * N * 128));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) WgmmaBf16<N>::go(acc, left + 2 * k, right + 2 * k, i + k > 0);  // the first overwrites
    wgmma_commit();
    wgmma_wait<1>();  // the unit before has been read
    if (i > 0 && lane == 0) mbar_arrive(&empty[(i - 1) % ring]);
  }
  wgmma_wait<0>();
  fence_regs(acc);
}

// What is wanted of them: of a unit's row those of its own part, to `sums[row][token]`. A part has `each` rows of the
// right operand, `tokens` of which count. A lane has rows g and g + 8 of its warp's 16 and columns 2 q, 2 q + 1 of
// every eight.
template <int N, int MOST, class Part>
__device__ __forceinline__ void keep_own(const float (&acc)[N / 2], float (&sums)[64][MOST], int each, int tokens,
                                         Part part_of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int j = 0; j < N / 2; ++j) {
    const int row = warp * 16 + lane / 4 + j % 4 / 2 * 8, column = j / 4 * 8 + lane % 4 * 2 + j % 2;
    const int token = column - part_of(row) * each;
    if (token >= 0 && token < tokens) sums[row][token] = acc[j];
  }
}

}  // namespace few_bf16
