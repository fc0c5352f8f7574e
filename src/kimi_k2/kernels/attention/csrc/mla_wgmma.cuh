// Instructions of MLA decode attention: scores from shared memory, values with the weights in registers. Operand lists
// come from wgmma.cuh.
#pragma once
#include "common/csrc/wgmma.cuh"

namespace mla {

using namespace ptx;

// d (+)= A[64, 16] B[64, 16]^T, both K-major in shared memory; accumulate 0 overwrites d.
__device__ __forceinline__ void scores_step(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PTX_S32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
      : PTX_D32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

// d += A[64, 16] B[16, 128], A in registers, B with its 128 columns contiguous (MN-major) in shared memory.
__device__ __forceinline__ void values_step(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PTX_S64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : PTX_D32(d, 0), PTX_D32(d, 32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d (+)= A[64, 16] B[8, 16]^T in shared memory: A K-major, or with ROWS_LAST its 64 rows contiguous; B K-major.
// accumulate 0 overwrites d.
template <int ROWS_LAST>
__device__ __forceinline__ void few_step(float (&d)[4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {" PTX_S4 "}, %4, %5, p, 1, 1, %7, 0;\n}\n"
      : PTX_D4(d, 0)
      : "l"(a), "l"(b), "r"(accumulate), "n"(ROWS_LAST));
}

}  // namespace mla
