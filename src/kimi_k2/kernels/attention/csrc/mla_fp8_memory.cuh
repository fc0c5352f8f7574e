// Shared memory of MLA decode attention in e4m3 (mla_fp8.cuh), and how operands in it are named to the tensor cores.
#pragma once
#include "mla_copy.cuh"

namespace mla {

constexpr int kFp8Threads = 512, kTile = kRows * kRow;  // of e4m3: four boxes of 128 columns, then one of 64
constexpr int kWideBox = kRows * 128, kRope = 4 * kWideBox;
// Registers of a thread that scores, sums values, copies.
template <int HEADS>
constexpr int kScoreRegisters = HEADS > 32 ? 136 : 160;
template <int HEADS>
constexpr int kValueRegisters = HEADS > 32 ? 176 : 160;
constexpr int kCopyRegisters = 24;
// Weights are times two to `kWeightLog`. In float16 what they are relative to moves to a larger score only where that
// is more than two to `kSlack` as large, so that sums seldom shrink: weights lie below 2^12.
constexpr float kWeightLog = 8, kSlack = 4;
constexpr int kScorers = 6, kAllTakers = 5;  // named barriers
// Warps that round the first item's queries; those of the others the first warpgroup alone.
constexpr int kTakers = 12;

// Queries are sums of so many TERMS in e4m3: one rounds them, two hold bfloat16's bits.
template <int HEADS, int TERMS>
struct alignas(1024) Fp8Memory {
  static constexpr int kHeads = HEADS, kTerms = TERMS;
  // The first warpgroup is up to two steps ahead of the others. A fifth stage, or asking the L2 for rows before their
  // copy, made it no faster over long contexts; over short ones a fifth leaves the merge no room beside this launch.
  static constexpr int kDepth = TERMS > 1 ? 3 : 4;
  uint8_t query[TERMS][kTile], stage[kDepth][kTile], weights[2][HEADS * kRows * 2];
  float scale[kRows], shrink[2][kRows], inverse[2][kRows];
  // Of each of the four warps that score a byte: whether sums of its heads shrink.
  uint32_t grown[2];
  // Of the weights, a warp's first lane arrives for all behind a __syncwarp. compute-sanitizer's racecheck (CUDA 13.0)
  // does not count that for the other lanes: it reports their `shrink` and `inverse`, 7 of every 8 written.
  uint64_t full[kDepth], empty[kDepth], weights_full[2], weights_empty[2];
};

// The lower half of a K-major operand's descriptor, the same for all threads: sums of it with multiples of 16 bytes
// take one instruction. The upper half is a constant: with rows of 128 bytes 128-byte swizzle and 1,024 bytes from 8
// rows to the next 8, with rows of 64 bytes 64-byte swizzle and 512.
__device__ __forceinline__ uint32_t lower_half(const void* operand) {
  return __shfl_sync(~0u, (smem_u32(operand) & 0x3FFFF) >> 4 | 1 << 16, 0);
}
#define MLA_ROWS_128 "0x40000040"
#define MLA_ROWS_64 "0x80000020"

}  // namespace mla
