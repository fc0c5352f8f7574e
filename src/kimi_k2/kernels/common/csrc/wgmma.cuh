// Warpgroup matrix instructions of shape 64 x N x 32 over e4m3 operands in shared memory, float32 accumulators, and
// of shape 64 x N x 16 over bf16 with the left operand in registers. Operand lists cannot be written by a template,
// so each N has its specialisation, built from the same macros.
#pragma once
#include "ptx.cuh"

namespace moe {

// clang-format off
#define MOE_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOE_D8(d, i) MOE_D4(d, i), MOE_D4(d, i + 4)
#define MOE_D16(d, i) MOE_D8(d, i), MOE_D8(d, i + 8)
#define MOE_D32(d, i) MOE_D16(d, i), MOE_D16(d, i + 16)
#define MOE_S4 "%0, %1, %2, %3"
#define MOE_S8 MOE_S4 ", %4, %5, %6, %7"
#define MOE_S12 MOE_S8 ", %8, %9, %10, %11"
#define MOE_S16 MOE_S12 ", %12, %13, %14, %15"
#define MOE_S20 MOE_S16 ", %16, %17, %18, %19"
#define MOE_S24 MOE_S20 ", %20, %21, %22, %23"
#define MOE_S28 MOE_S24 ", %24, %25, %26, %27"
#define MOE_S32 MOE_S28 ", %28, %29, %30, %31"
#define MOE_S36 MOE_S32 ", %32, %33, %34, %35"
#define MOE_S40 MOE_S36 ", %36, %37, %38, %39"
#define MOE_S44 MOE_S40 ", %40, %41, %42, %43"
#define MOE_S48 MOE_S44 ", %44, %45, %46, %47"
#define MOE_S52 MOE_S48 ", %48, %49, %50, %51"
#define MOE_S56 MOE_S52 ", %52, %53, %54, %55"
#define MOE_S60 MOE_S56 ", %56, %57, %58, %59"
#define MOE_S64 MOE_S60 ", %60, %61, %62, %63"
// clang-format on

template <int N>
struct Wgmma;

#define MOE_WGMMA(N, R, A, B, P, ...)                                                                       \
  template <>                                                                                               \
  struct Wgmma<N> {                                                                                         \
    /* d (+)= A[64, 32] B[N, 32]^T in e4m3; accumulate 0 overwrites d. */                                   \
    static __device__ __forceinline__ void e4m3(float (&d)[R], uint64_t a, uint64_t b, int accumulate) {    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" MOE_S##R "}, %" A ", %" B    \
                   ", p, 1, 1;\n}\n"                                                                        \
                   : __VA_ARGS__                                                                            \
                   : "l"(a), "l"(b), "r"(accumulate));                                                      \
    }                                                                                                       \
  };

MOE_WGMMA(8, 4, "4", "5", "6", MOE_D4(d, 0))
MOE_WGMMA(16, 8, "8", "9", "10", MOE_D8(d, 0))
MOE_WGMMA(24, 12, "12", "13", "14", MOE_D8(d, 0), MOE_D4(d, 8))
MOE_WGMMA(32, 16, "16", "17", "18", MOE_D16(d, 0))
MOE_WGMMA(48, 24, "24", "25", "26", MOE_D16(d, 0), MOE_D8(d, 16))
MOE_WGMMA(64, 32, "32", "33", "34", MOE_D32(d, 0))
MOE_WGMMA(96, 48, "48", "49", "50", MOE_D32(d, 0), MOE_D16(d, 32))
MOE_WGMMA(128, 64, "64", "65", "66", MOE_D32(d, 0), MOE_D32(d, 32))

#undef MOE_WGMMA

}  // namespace moe
