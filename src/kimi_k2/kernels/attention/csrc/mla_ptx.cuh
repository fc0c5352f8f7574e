// Instructions of MLA decode attention: scores from shared memory, values with the weights in registers. Operand lists come from wgmma.cuh.
#pragma once
#include "common/csrc/wgmma.cuh"

namespace mla {

// Shared-memory matrix descriptor with 128-byte swizzle (PTX ISA, "matrix descriptor": addresses and offsets in units
// of 16 bytes; start in bits 0-13, leading dimension offset in 16-29, stride dimension offset in 32-45, swizzle in 62-63).
//   K-major operand (rows of 64 values along K): `stride` is from 8 rows to the next 8; `leading` is not used.
//   MN-major operand (rows of 64 values along M or N): `leading` is from 64 values to the next 64 along M or N, `stride`
//   from 8 rows to the next 8 along K.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return (uint64_t(1) << 62) | (uint64_t(stride >> 4) << 32) | (uint64_t(leading >> 4) << 16) |
         uint64_t((address & 0x3FFFF) >> 4);
}

// d (+)= A[64, 16] B[64, 16]^T, both K-major in shared memory; accumulate 0 overwrites d.
__device__ __forceinline__ void scores_step(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MOE_S32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
               : MOE_D32(d, 0)
               : "l"(a), "l"(b), "r"(accumulate));
}

// d += A[64, 16] B[16, 128], A in registers, B with its 128 columns contiguous (MN-major) in shared memory.
__device__ __forceinline__ void values_step(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MOE_S64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : MOE_D32(d, 0), MOE_D32(d, 32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d (+)= A[64, 16] B[8, 16]^T in shared memory: A K-major, or with ROWS_LAST its 64 rows contiguous; B K-major. accumulate 0
// overwrites d.
template <int ROWS_LAST>
__device__ __forceinline__ void few_step(float (&d)[4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {" MOE_S4 "}, %4, %5, p, 1, 1, %7, 0;\n}\n"
               : MOE_D4(d, 0)
               : "l"(a), "l"(b), "r"(accumulate), "n"(ROWS_LAST));
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Brings `bytes`, a multiple of 16, to the L2, to be evicted first.
__device__ __forceinline__ void prefetch_bulk_l2(const void* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(p), "r"(bytes),
               "l"(moe::kEvictFirst)
               : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace mla
