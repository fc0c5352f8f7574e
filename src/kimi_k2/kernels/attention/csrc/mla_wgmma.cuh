// Instructions of MLA decode attention: scores from shared memory, values with the weights in registers. Operand lists
// come from wgmma.cuh.
#pragma once
#include "common/csrc/wgmma.cuh"

namespace mla {

using namespace ptx;

// A cache of bfloat16 is multiplied in bfloat16. One of e4m3 comes to shared memory as float16, which holds its values
// exactly and takes one instruction for two of them, where bfloat16 takes four by way of float32.
template <bool HALF>
struct Instructions;

#define MLA_INSTRUCTIONS(HALF, TYPE)                                                                                  \
  template <>                                                                                                         \
  struct Instructions<HALF> {                                                                                         \
    /* d (+)= A[64, 16] B[64, 16]^T, both K-major in shared memory; accumulate 0 overwrites d. */                     \
    static __device__ __forceinline__ void scores(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {           \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" PTX_S32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n" \
          : PTX_D32(d, 0)                                                                                             \
          : "l"(a), "l"(b), "r"(accumulate));                                                                         \
    }                                                                                                                 \
    /* d += A[64, 16] B[16, 128], A in registers, B with its 128 columns contiguous (MN-major) in shared memory. */   \
    static __device__ __forceinline__ void values(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {               \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" PTX_S64                          \
                   "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"                                                      \
                   : PTX_D32(d, 0), PTX_D32(d, 32)                                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
    }                                                                                                                 \
    /* d (+)= A[64, 16] B[8 or 16, 16]^T in shared memory: A K-major, or with ROWS_LAST its 64 rows contiguous; B     \
       K-major. accumulate 0 overwrites d. */                                                                         \
    template <int ROWS_LAST>                                                                                          \
    static __device__ __forceinline__ void few(float (&d)[4], uint64_t a, uint64_t b, int accumulate) {               \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"                                                                 \
          "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {" PTX_S4 "}, %4, %5, p, 1, 1, %7, 0;\n}\n"    \
          : PTX_D4(d, 0)                                                                                              \
          : "l"(a), "l"(b), "r"(accumulate), "n"(ROWS_LAST));                                                         \
    }                                                                                                                 \
    template <int ROWS_LAST>                                                                                          \
    static __device__ __forceinline__ void few(float (&d)[8], uint64_t a, uint64_t b, int accumulate) {               \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"                                                                \
          "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {" PTX_S8 "}, %8, %9, p, 1, 1, %11, 0;\n}\n"  \
          : PTX_D8(d, 0)                                                                                              \
          : "l"(a), "l"(b), "r"(accumulate), "n"(ROWS_LAST));                                                         \
    }                                                                                                                 \
  };

MLA_INSTRUCTIONS(false, "bf16")
MLA_INSTRUCTIONS(true, "f16")

#undef MLA_INSTRUCTIONS

__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
  const __half2 both = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&both);
}
// Two e4m3 values, in the lower half, as float16.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t fp8) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(fp8)));
  return halves;
}
// Two values as they are multiplied.
template <bool HALF>
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  return HALF ? pack_f16(lo, hi) : pack_bf16(lo, hi);
}

}  // namespace mla
