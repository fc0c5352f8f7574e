// Four-bit weights as the kernels of w4a16*.cu read them, a structure a stored format. Words of eight weights lie alike
// (w4a16.cuh); formats differ in what four bits are and in their scales.
//
// GROUP columns share a scale. Group: the scales of rows g and g + 8, of 32 columns or of a wider group; Row: the
// GROUPS of them that a chunk's 128 columns have. WHOLE: scales are to be multiplied by one of all the matrix. kSum:
// what sums of e4m3 codes by scales are multiplied by, beyond what INT4's are (w4a16_records.cuh).
#pragma once
#include <type_traits>

#include "common/csrc/decode_ptx.cuh"

namespace w4a16 {

// Unpacked to bf16, weights come out 2^kDown times too small, as some factors of the scales would not fit bf16.
constexpr int kDown = 32;
constexpr float kUp = 0x1p32f;  // what sums of products are multiplied by in the end

// Powers of two for the two halves of a register.
__device__ __forceinline__ __nv_bfloat162 powers(int low, int high) {
  const uint32_t bits = (low + 127) << 7 | (high + 127) << 23;
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}
__device__ __forceinline__ __nv_bfloat162 as_bf16(uint32_t bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

template <class Row>
__device__ __forceinline__ uint32_t word_of(const Row& row, int i) {
  if constexpr (sizeof(Row) == 4) {
    return row;
  } else if constexpr (sizeof(Row) == 8) {
    return i ? row.y : row.x;
  } else {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
    return words[i];
  }
}

// Symmetric INT4 in groups of 32, 64 or 128: nibbles are value + 8, scales bf16.
template <int GROUP_>
struct Int4Groups {
  static constexpr int GROUP = GROUP_, GROUPS = 128 / GROUP;
  static constexpr bool OFFSET = true, WHOLE = false;
  static constexpr float kSum = 1.f;
  using Group = uint32_t;
  using Row = std::conditional_t<GROUPS == 4, uint4, std::conditional_t<GROUPS == 2, uint2, uint32_t>>;

  // Rows g and g + 8 of 16 columns by 16 (a word is 8 weights of both). A nibble alone in bits 0 to 3 or 4 to 7 of a
  // bf16 is n or 16 n times the smallest bf16, 2^-133, so one fused operation makes (n - 8) * scale, rounded once.
  // 2^101 times a scale fits bf16 up to scales of 2^26.
  struct Unpack {
    __nv_bfloat162 scale[2], offset[2];
    Unpack() = default;
    // `half` of the group: both have its scales.
    __device__ __forceinline__ explicit Unpack(Group group, int half) {
      const __nv_bfloat162 scales = as_bf16(group);
      const __nv_bfloat162 times = __hmul2(scales, powers(133 - kDown, 129 - kDown));
      const __nv_bfloat162 less = __hmul2(scales, __hneg2(powers(3 - kDown, 3 - kDown)));
      scale[0] = __low2bfloat162(times), scale[1] = __high2bfloat162(times);
      offset[0] = __low2bfloat162(less), offset[1] = __high2bfloat162(less);
    }
    __device__ __forceinline__ void operator()(uint32_t (&a)[4], uint32_t word) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t nibbles = (word >> (i / 2 * 8)) & (i % 2 ? 0x00F000F0u : 0x000F000Fu);
        const __nv_bfloat162 d = __hfma2(as_bf16(nibbles), scale[i % 2], offset[i % 2]);
        a[i] = *reinterpret_cast<const uint32_t*>(&d);
      }
    }
  };

  // As e4m3 a nibble with zeros above it is n / 512.
  static __device__ __forceinline__ void codes(uint32_t& row, uint32_t& other, uint32_t word) {
    row = word & 0x0f0f0f0fu, other = (word >> 4) & 0x0f0f0f0fu;
  }
  static __device__ __forceinline__ void times(const Row& row, int group, int half, float& low, float& high) {
    const uint32_t pair = word_of(row, group * GROUPS / 4);
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
  }
};

using Int4 = Int4Groups<32>;

// Four-bit floats (e2m1: sign, two bits of exponent, one of mantissa) have their bits where the wider float has them,
// with zeros around: in e4m3 that is value / 64, in bf16 value / 2^126, subnormal ones included.
struct E2m1 {
  static constexpr bool OFFSET = false;
  struct Unpack {
    __nv_bfloat162 scale[2];
    Unpack() = default;
    // `scales`: of both rows, times 2^126 / 2^kDown.
    __device__ __forceinline__ explicit Unpack(__nv_bfloat162 scales) {
      scale[0] = __low2bfloat162(scales), scale[1] = __high2bfloat162(scales);
    }
    __device__ __forceinline__ void operator()(uint32_t (&a)[4], uint32_t word) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t magnitude = i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6);
        const uint32_t bits = (magnitude & 0x01C001C0u) | ((word << (12 - 4 * i)) & 0x80008000u);
        const __nv_bfloat162 d = __hmul2(as_bf16(bits), scale[i % 2]);
        a[i] = *reinterpret_cast<const uint32_t*>(&d);
      }
    }
  };
  static __device__ __forceinline__ void codes(uint32_t& row, uint32_t& other, uint32_t word) {
    row = ((word << 2) & 0x1c1c1c1cu) | ((word << 4) & 0x80808080u);
    other = ((word >> 2) & 0x1c1c1c1cu) | (word & 0x80808080u);
  }
};

// MXFP4: groups of 32, scales e8m0, which are a float's exponent; that of 2^-127 is taken for zero.
struct Mxfp4 : E2m1 {
  static constexpr int GROUP = 32, GROUPS = 4;
  static constexpr bool WHOLE = false;
  static constexpr float kSum = 64.f / 512.f;
  using Group = uint16_t;
  using Row = uint2;
  struct Unpack : E2m1::Unpack {
    Unpack() = default;
    __device__ __forceinline__ explicit Unpack(uint32_t group, int half)
        : E2m1::Unpack(
              __hmul2(as_bf16((group & 0xff) << 7 | (group & 0xff00) << 15), powers(126 - kDown, 126 - kDown))) {}
  };
  static __device__ __forceinline__ void times(const Row& row, int group, int half, float& low, float& high) {
    const uint32_t word = word_of(row, group / 2);
    constexpr uint32_t kExponent = 0x7f800000u;
    low = __uint_as_float((group % 2 ? word << 7 : word << 23) & kExponent);
    high = __uint_as_float((group % 2 ? word >> 1 : word << 15) & kExponent);
  }
};

// NVFP4: groups of 16, scales e4m3 without a sign, and one scale of all. The product of value and scale fits bf16. A
// scale's bits in a wider float are scale / 2^120.
struct Nvfp4 : E2m1 {
  static constexpr int GROUP = 16, GROUPS = 4;
  static constexpr bool WHOLE = true;
  static constexpr float kSum = 0x1p120f * 64.f / 512.f;
  using Group = uint32_t;
  using Row = uint4;
  struct Unpack : E2m1::Unpack {
    Unpack() = default;
    __device__ __forceinline__ explicit Unpack(uint32_t group, int half) : E2m1::Unpack(scales(group >> (16 * half))) {}
    static __device__ __forceinline__ __nv_bfloat162 scales(uint32_t pair) {
      const __nv_bfloat162 bits = as_bf16((pair & 0x7f) << 4 | (pair & 0x7f00) << 12);
      return __hmul2(__hmul2(bits, powers(120, 120)), powers(126 - kDown, 126 - kDown));
    }
  };
  static __device__ __forceinline__ void times(const Row& row, int group, int half, float& low, float& high) {
    const uint32_t word = word_of(row, group);
    constexpr uint32_t kBits = 0x07f00000u;
    low = __uint_as_float((half ? word << 4 : word << 20) & kBits);
    high = __uint_as_float((half ? word >> 4 : word << 12) & kBits);
  }
};

// What sums are multiplied by for a scale of all the matrix.
__device__ __forceinline__ float factor_of(const float* all, bool divides) {
  return divides ? 1.f / __ldg(all) : __ldg(all);
}

constexpr int kChunkBytes = 16384;  // of a chunk's words
// Bytes of a chunk's scales, and of those of one of its four tiles.
template <class F>
constexpr int kScaleBytes = 128 * sizeof(typename F::Row);
template <class F>
constexpr int kTileScales = kScaleBytes<F> / 4;

}  // namespace w4a16
