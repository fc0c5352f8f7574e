// Warpgroup matrix instructions with float32 accumulators. Operand lists cannot be written by a template, so each N has
// its specialisation, built from the same macros.
//
//   WgmmaE4m3<N>     64 x N x 32 over e4m3, both operands in shared memory
//   WgmmaE4m3Rs<N>   the same with the left operand in registers
//   WgmmaBf16<N>     64 x N x 16 over bf16, both operands in shared memory
//   WgmmaBf16Rs<N>   the same with the left operand in registers
#pragma once
#include "ptx.cuh"

namespace ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void fence_regs(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared-memory matrix descriptor: K-major rows of 128 bytes, 128-byte swizzle, 8-row groups 1024 bytes apart.
__device__ __forceinline__ uint64_t desc_sw128(uint32_t addr) {
  return (uint64_t(1) << 62) | (uint64_t(64) << 32) | (uint64_t(1) << 16) | uint64_t((addr & 0x3FFFF) >> 4);
}

// Shared-memory matrix descriptor with 128-byte swizzle (PTX ISA, "matrix descriptor": addresses and offsets in units
// of 16 bytes; start in bits 0-13, leading dimension offset in 16-29, stride dimension offset in 32-45, swizzle in
// 62-63).
//   K-major operand (rows of 64 values along K): `stride` is from 8 rows to the next 8; `leading` is not used.
//   MN-major operand (rows of 64 values along M or N): `leading` is from 64 values to the next 64 along M or N,
//   `stride` from 8 rows to the next 8 along K.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return (uint64_t(1) << 62) | (uint64_t(stride >> 4) << 32) | (uint64_t(leading >> 4) << 16) |
         uint64_t((address & 0x3FFFF) >> 4);
}

// clang-format off
#define PTX_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PTX_D8(d, i) PTX_D4(d, i), PTX_D4(d, i + 4)
#define PTX_D16(d, i) PTX_D8(d, i), PTX_D8(d, i + 8)
#define PTX_D32(d, i) PTX_D16(d, i), PTX_D16(d, i + 16)
#define PTX_S4 "%0, %1, %2, %3"
#define PTX_S8 PTX_S4 ", %4, %5, %6, %7"
#define PTX_S12 PTX_S8 ", %8, %9, %10, %11"
#define PTX_S16 PTX_S12 ", %12, %13, %14, %15"
#define PTX_S20 PTX_S16 ", %16, %17, %18, %19"
#define PTX_S24 PTX_S20 ", %20, %21, %22, %23"
#define PTX_S28 PTX_S24 ", %24, %25, %26, %27"
#define PTX_S32 PTX_S28 ", %28, %29, %30, %31"
#define PTX_S36 PTX_S32 ", %32, %33, %34, %35"
#define PTX_S40 PTX_S36 ", %36, %37, %38, %39"
#define PTX_S44 PTX_S40 ", %40, %41, %42, %43"
#define PTX_S48 PTX_S44 ", %44, %45, %46, %47"
#define PTX_S52 PTX_S48 ", %48, %49, %50, %51"
#define PTX_S56 PTX_S52 ", %52, %53, %54, %55"
#define PTX_S60 PTX_S56 ", %56, %57, %58, %59"
#define PTX_S64 PTX_S60 ", %60, %61, %62, %63"
#define PTX_S72 PTX_S64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PTX_S80 PTX_S72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PTX_S88 PTX_S80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PTX_S96 PTX_S88 ", %88, %89, %90, %91, %92, %93, %94, %95"
// clang-format on

template <int N>
struct WgmmaE4m3;

#define PTX_WGMMA(N, R, A, B, P, ...)                                                                      \
  template <>                                                                                              \
  struct WgmmaE4m3<N> {                                                                                    \
    /* d (+)= A[64, 32] B[N, 32]^T in e4m3; accumulate 0 overwrites d. */                                  \
    static __device__ __forceinline__ void go(float (&d)[R], uint64_t a, uint64_t b, int accumulate) {     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P                                                  \
                   ", 0;\n"                                                                                \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" PTX_S##R "}, %" A ", %" B  \
                                                                                         ", p, 1, 1;\n}\n" \
                   : __VA_ARGS__                                                                           \
                   : "l"(a), "l"(b), "r"(accumulate));                                                     \
    }                                                                                                      \
  };

PTX_WGMMA(8, 4, "4", "5", "6", PTX_D4(d, 0))
PTX_WGMMA(16, 8, "8", "9", "10", PTX_D8(d, 0))
PTX_WGMMA(24, 12, "12", "13", "14", PTX_D8(d, 0), PTX_D4(d, 8))
PTX_WGMMA(32, 16, "16", "17", "18", PTX_D16(d, 0))
PTX_WGMMA(48, 24, "24", "25", "26", PTX_D16(d, 0), PTX_D8(d, 16))
PTX_WGMMA(64, 32, "32", "33", "34", PTX_D32(d, 0))
PTX_WGMMA(72, 36, "36", "37", "38", PTX_D32(d, 0), PTX_D4(d, 32))
PTX_WGMMA(88, 44, "44", "45", "46", PTX_D32(d, 0), PTX_D8(d, 32), PTX_D4(d, 40))
PTX_WGMMA(96, 48, "48", "49", "50", PTX_D32(d, 0), PTX_D16(d, 32))
PTX_WGMMA(128, 64, "64", "65", "66", PTX_D32(d, 0), PTX_D32(d, 32))
PTX_WGMMA(144, 72, "72", "73", "74", PTX_D32(d, 0), PTX_D32(d, 32), PTX_D8(d, 64))
PTX_WGMMA(192, 96, "96", "97", "98", PTX_D32(d, 0), PTX_D32(d, 32), PTX_D32(d, 64))

#undef PTX_WGMMA

template <int N>
struct WgmmaBf16;

#define PTX_WGMMA(N, R, A, B, P, ...)                                                                            \
  template <>                                                                                                    \
  struct WgmmaBf16<N> {                                                                                          \
    /* d (+)= A[64, 16] B[N, 16]^T in bf16; accumulate 0 overwrites d. */                                        \
    static __device__ __forceinline__ void go(float (&d)[R], uint64_t a, uint64_t b, int accumulate) {           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P                                                        \
                   ", 0;\n"                                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PTX_S##R "}, %" A ", %" B        \
                                                                                         ", p, 1, 1, 0, 0;\n}\n" \
                   : __VA_ARGS__                                                                                 \
                   : "l"(a), "l"(b), "r"(accumulate));                                                           \
    }                                                                                                            \
  };

PTX_WGMMA(8, 4, "4", "5", "6", PTX_D4(d, 0))
PTX_WGMMA(16, 8, "8", "9", "10", PTX_D8(d, 0))
PTX_WGMMA(32, 16, "16", "17", "18", PTX_D16(d, 0))
PTX_WGMMA(64, 32, "32", "33", "34", PTX_D32(d, 0))
PTX_WGMMA(128, 64, "64", "65", "66", PTX_D32(d, 0), PTX_D32(d, 32))

#undef PTX_WGMMA

template <int N>
struct WgmmaBf16Rs;

#define PTX_WGMMA(N, R, A0, A1, A2, A3, B, ...)                                                    \
  template <>                                                                                      \
  struct WgmmaBf16Rs<N> {                                                                          \
    /* d += A[64, 16] B[N, 16]^T */                                                                \
    static __device__ __forceinline__ void go(float (&d)[R], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PTX_S##R           \
                   "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", 1, 1, 1, 0;\n"                \
                   : __VA_ARGS__                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
    }                                                                                              \
  };

PTX_WGMMA(8, 4, "4", "5", "6", "7", "8", PTX_D4(d, 0))
PTX_WGMMA(16, 8, "8", "9", "10", "11", "12", PTX_D8(d, 0))
PTX_WGMMA(24, 12, "12", "13", "14", "15", "16", PTX_D8(d, 0), PTX_D4(d, 8))
PTX_WGMMA(32, 16, "16", "17", "18", "19", "20", PTX_D16(d, 0))
PTX_WGMMA(48, 24, "24", "25", "26", "27", "28", PTX_D16(d, 0), PTX_D8(d, 16))
PTX_WGMMA(64, 32, "32", "33", "34", "35", "36", PTX_D32(d, 0))
PTX_WGMMA(80, 40, "40", "41", "42", "43", "44", PTX_D32(d, 0), PTX_D8(d, 32))
PTX_WGMMA(96, 48, "48", "49", "50", "51", "52", PTX_D32(d, 0), PTX_D16(d, 32))
PTX_WGMMA(112, 56, "56", "57", "58", "59", "60", PTX_D32(d, 0), PTX_D16(d, 32), PTX_D8(d, 48))
PTX_WGMMA(120, 60, "60", "61", "62", "63", "64", PTX_D32(d, 0), PTX_D16(d, 32), PTX_D8(d, 48), PTX_D4(d, 56))
PTX_WGMMA(128, 64, "64", "65", "66", "67", "68", PTX_D32(d, 0), PTX_D32(d, 32))

#undef PTX_WGMMA

template <int N>
struct WgmmaE4m3Rs;

#define PTX_WGMMA(N, R, A0, A1, A2, A3, B, P, ...)                                                                 \
  template <>                                                                                                      \
  struct WgmmaE4m3Rs<N> {                                                                                          \
    /* d (+)= A[64, 32] B[N, 32]^T; accumulate 0 overwrites d. */                                                  \
    static __device__ __forceinline__ void go(float (&d)[R], const uint32_t (&a)[4], uint32_t b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" P ", 0;\nmov.b64 b, {%" B                    \
                   ", 0x40000040};\n"                                                                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" PTX_S##R                           \
                   "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, b, p, 1, 1;\n}\n"                                     \
                   : __VA_ARGS__                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));                         \
    }                                                                                                              \
    /* desc_sw128 but for its upper half, which is a constant above: sums of it take half the instructions. */     \
    static __device__ __forceinline__ uint32_t place(const void* tile) {                                           \
      return uint32_t(desc_sw128(smem_u32(tile)));                                                                 \
    }                                                                                                              \
  };

PTX_WGMMA(8, 4, "4", "5", "6", "7", "8", "9", PTX_D4(d, 0))
PTX_WGMMA(16, 8, "8", "9", "10", "11", "12", "13", PTX_D8(d, 0))
PTX_WGMMA(24, 12, "12", "13", "14", "15", "16", "17", PTX_D8(d, 0), PTX_D4(d, 8))
PTX_WGMMA(32, 16, "16", "17", "18", "19", "20", "21", PTX_D16(d, 0))

#undef PTX_WGMMA

}  // namespace ptx
