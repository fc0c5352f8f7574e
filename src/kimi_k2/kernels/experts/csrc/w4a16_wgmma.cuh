// Warpgroup matrix instructions with the left operand in registers, the right one in shared memory (K-major) and float32
// accumulators: 64 x N x 16 over bf16 and, for few tokens, 64 x N x 32 over e4m3. The operand lists come from
// wgmma.cuh.
#pragma once
#include "common/csrc/wgmma.cuh"

namespace w4a16 {

template <int N>
struct Wgmma;

#define W4A16_WGMMA(N, R, A0, A1, A2, A3, B, ...)                                                                   \
  template <>                                                                                                      \
  struct Wgmma<N> {                                                                                                 \
    /* d += A[64, 16] B[N, 16]^T */                                                                                 \
    static __device__ __forceinline__ void bf16(float (&d)[R], const uint32_t (&a)[4], uint64_t b) {                \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MOE_S##R "}, {%" A0 ", %" A1 ", %" A2 \
                   ", %" A3 "}, %" B ", 1, 1, 1, 0;\n"                                                              \
                   : __VA_ARGS__                                                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                           \
    }                                                                                                               \
  };

W4A16_WGMMA(8, 4, "4", "5", "6", "7", "8", MOE_D4(d, 0))
W4A16_WGMMA(16, 8, "8", "9", "10", "11", "12", MOE_D8(d, 0))
W4A16_WGMMA(24, 12, "12", "13", "14", "15", "16", MOE_D8(d, 0), MOE_D4(d, 8))
W4A16_WGMMA(32, 16, "16", "17", "18", "19", "20", MOE_D16(d, 0))
W4A16_WGMMA(48, 24, "24", "25", "26", "27", "28", MOE_D16(d, 0), MOE_D8(d, 16))
W4A16_WGMMA(64, 32, "32", "33", "34", "35", "36", MOE_D32(d, 0))
W4A16_WGMMA(80, 40, "40", "41", "42", "43", "44", MOE_D32(d, 0), MOE_D8(d, 32))
W4A16_WGMMA(96, 48, "48", "49", "50", "51", "52", MOE_D32(d, 0), MOE_D16(d, 32))
W4A16_WGMMA(112, 56, "56", "57", "58", "59", "60", MOE_D32(d, 0), MOE_D16(d, 32), MOE_D8(d, 48))
W4A16_WGMMA(120, 60, "60", "61", "62", "63", "64", MOE_D32(d, 0), MOE_D16(d, 32), MOE_D8(d, 48), MOE_D4(d, 56))
W4A16_WGMMA(128, 64, "64", "65", "66", "67", "68", MOE_D32(d, 0), MOE_D32(d, 32))

#undef W4A16_WGMMA

template <int N>
struct WgmmaE4m3;

#define W4A16_WGMMA(N, R, A0, A1, A2, A3, B, P, ...)                                                                \
  template <>                                                                                                      \
  struct WgmmaE4m3<N> {                                                                                             \
    /* d (+)= A[64, 32] B[N, 32]^T; accumulate 0 overwrites d. */                                                   \
    static __device__ __forceinline__ void go(float (&d)[R], const uint32_t (&a)[4], uint32_t b, int accumulate) {  \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" P ", 0;\nmov.b64 b, {%" B ", 0x40000040};\n"    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" MOE_S##R "}, {%" A0 ", %" A1 ", %" A2 \
                   ", %" A3 "}, b, p, 1, 1;\n}\n"                                                                   \
                   : __VA_ARGS__                                                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));                          \
    }                                                                                                               \
    /* moe::desc_sw128 but for its upper half, which is a constant above: sums of it take half the instructions. */ \
    static __device__ __forceinline__ uint32_t place(const void* tile) {                                            \
      return uint32_t(moe::desc_sw128(moe::smem_u32(tile)));                                                        \
    }                                                                                                               \
  };

W4A16_WGMMA(8, 4, "4", "5", "6", "7", "8", "9", MOE_D4(d, 0))
W4A16_WGMMA(16, 8, "8", "9", "10", "11", "12", "13", MOE_D8(d, 0))
W4A16_WGMMA(24, 12, "12", "13", "14", "15", "16", "17", MOE_D8(d, 0), MOE_D4(d, 8))
W4A16_WGMMA(32, 16, "16", "17", "18", "19", "20", "21", MOE_D16(d, 0))

#undef W4A16_WGMMA

}  // namespace w4a16
