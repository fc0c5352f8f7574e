// Tokens of the four-bit experts' e4m3 GEMMs (w4a16_e4m3.cuh) as records, and how they come into the ring.
//
// An activation chunk (128 columns of a token) is a record: the upper values, the lower ones, the four groups' offsets
// -8 / c * sum, each as the sum of two bf16, and 512 / c. In each 16 columns, value 4q + 2p + h is column 8h + 2q + p,
// as the weights' words have it.
#pragma once
#include "w4a16.cuh"

namespace w4a16 {

// The power of two that brings `amax` to 128..256, where values down to 2^-10 of it keep all of bf16's bits.
struct Power {
  float up, down;
  __device__ __forceinline__ explicit Power(float amax) {
    const int exponent = max(__float_as_int(amax) >> 23, 8);
    up = __int_as_float((261 - exponent) << 23);
    down = __int_as_float((exponent - 7) << 23);
  }
  __device__ __forceinline__ float product_factor() const { return 512.f * down; }
  __device__ __forceinline__ uint32_t offset(float sum_of_codes) const {
    const float all = -8.f * down * sum_of_codes;
    return pack_bf16(all, all - __bfloat162float(__float2bfloat16_rn(all)));
  }
};

// Two values as e4m3, upper and lower halves; adds what they stand for to `sum`, exactly.
__device__ __forceinline__ void split(float a, float b, const Power& power, uint32_t& upper, uint32_t& lower,
                                      float& sum) {
  a *= power.up, b *= power.up;
  upper = to_e4m3(a, b);
  const float2 u = from_e4m3(upper);
  lower = to_e4m3(a - u.x, b - u.y);
  const float2 l = from_e4m3(lower);
  sum += (u.x + l.x) + (u.y + l.y);
}

// One record by one warp, whose lane holds 4 columns as bf16. `factor` is for lane 0, `offset`, two bf16 whose sum it
// is, for every eighth lane.
struct Encoded {
  uint32_t upper, lower;  // word (lane / 4) * 4 + `word` of the 32
  int word;
  float factor;
  uint32_t offset;
  __device__ __forceinline__ Encoded(uint2 raw, int lane) {
    const float2 a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.x));
    const float2 b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.y));
    float amax = fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y)));
#pragma unroll
    for (int d = 16; d; d >>= 1) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, d));
    const Power power(amax);
    uint32_t u[2], l[2];
    float sum = 0;
    split(a.x, a.y, power, u[0], l[0], sum);
    split(b.x, b.y, power, u[1], l[1], sum);
#pragma unroll
    for (int d = 4; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    factor = power.product_factor();
    offset = power.offset(sum);
    // Lanes 2 apart hold the same q for h = 0 and 1: each makes one of their two words.
    const int h = (lane >> 1) & 1;
    word = 2 * (lane & 1) + h;
    upper = pair_up(h ? u[1] : u[0], __shfl_xor_sync(0xffffffffu, h ? u[0] : u[1], 2), h);
    lower = pair_up(h ? l[1] : l[0], __shfl_xor_sync(0xffffffffu, h ? l[0] : l[1], 2), h);
  }
  static __device__ __forceinline__ uint32_t pair_up(uint32_t mine, uint32_t other, int h) {
    return h ? __byte_perm(other, mine, 0x5140) : __byte_perm(mine, other, 0x5140);
  }
};

// Before the main launch: every token's records, a warp each.
__global__ void __launch_bounds__(256) encode_kernel(const __grid_constant__ Args a) {
  const int lane = threadIdx.x & 31;
  const size_t record = (size_t)blockIdx.x * 8 + (threadIdx.x >> 5);
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (record >= (size_t)a.tokens * (a.hidden / 128)) return;
  const Encoded e(__ldcg(reinterpret_cast<const uint2*>(a.x) + record * 32 + lane), lane);
  unsigned char* to = reinterpret_cast<unsigned char*>(a.xs) + record * kRecord;
  uint32_t* words = reinterpret_cast<uint32_t*>(to) + (lane >> 2) * 4 + e.word;
  words[0] = e.upper;
  words[32] = e.lower;
  if (lane % 8 == 0) reinterpret_cast<uint32_t*>(to + 256)[lane / 8] = e.offset;
  if (lane == 0) *reinterpret_cast<float*>(to + 272) = e.factor;
}

// Up to here the upper and lower values of a tile's tokens share the right operand's 8 rows: one MMA makes both
// sums, which are added in the end. That rounds otherwise, so it is not done where a token may come into either of an
// expert's several tiles: in the prepared mode.
constexpr int kPaired = 4;
template <class C>
__device__ __forceinline__ bool is_paired(const int4& tile) {
  return C::SPLIT == 1 && tile.z <= kPaired && !tile.w;
}

// Where 16 bytes of a token's lower or upper values go in a stage's right operand, whose tiles are swizzled. With
// groups of 16 columns each group's lower ones are behind its upper ones.
template <class C>
__device__ __forceinline__ int place_of(int token, int part, bool lower, bool paired) {
  if constexpr (C::SPLIT == 2) {
    const int at = 2 * part + lower;
    return (at >> 3) * C::NMAX * 128 + token * 128 + (((at & 7) ^ (token & 7)) << 4);
  }
  const int row = token + (lower && paired ? kPaired : 0);
  return (lower && !paired ? C::NMAX * 128 : 0) + row * 128 + ((part ^ (row & 7)) << 4);
}

// Clears the rows of a stage that no token fills, if it held other rows last: zeros take the tensor cores less energy,
// and the card's limit of that bounds the speed. Of paired values the lower ones' offsets must be zero. One warp has
// the stage to itself. Past an odd number of tokens RecordCopy writes the same zeros: racecheck warns of that.
template <class C>
__device__ __forceinline__ void clear_unused(const Args& a, Smem<C>& s, int st, const int4& tile, int lane) {
  const bool paired = is_paired<C>(tile);
  const int n = tile.z, held = paired ? -n : n;
  if (s.held[st] == held) return;
  const int rows = paired ? kPaired : (n + 7) / 8 * 8, part = lane & 15;
  const uint32_t b = smem_u32(s.b[st]);
#pragma unroll 1
  for (int c = n + (lane >> 4); c < rows; c += 2)
    cp_async_16_or_zero(b + place_of<C>(c, part & 7, part >> 3, paired), a.xs, false);
  if (paired && lane >= kPaired && lane < 2 * kPaired)
    cp_async_16_or_zero(smem_u32(s.offset[st] + lane * 16), a.xs, false);
  __syncwarp();
  if (lane == 0) s.held[st] = held;
  __syncwarp();
}

// Copies an item's records chunk by chunk, asynchronously: a lane every other token's 16 bytes `lane & 15` of the
// values, and its own token's offsets and factor.
template <class C>
struct RecordCopy {
  const unsigned char* from;  // chunk 0 of row 0
  unsigned mine;              // where the lane's token's row begins, in 16 bytes
  int n, place;
  // `row` is that of token `lane`, `pitch` a row's records.
  __device__ __forceinline__ RecordCopy(const void* records, int pitch, int row, const int4& tile, int lane)
      : from(static_cast<const unsigned char*>(records)), n(tile.z) {
    const int part = lane & 15;
    place = place_of<C>(lane >> 4, part & 7, part >> 3, is_paired<C>(tile));
    mine = unsigned(row) * pitch * (kRecord / 16);
  }
  __device__ __forceinline__ void operator()(Smem<C>& s, int st, int kb, int lane) const {
    const uint32_t tile = smem_u32(s.b[st]);
    const unsigned char* chunk = from + kb * kRecord;
    asm volatile("" : "+l"(chunk));  // one multiplication with addition a row
#pragma unroll
    for (int i = 0; i < C::NMAX / 2; ++i) {
      if (2 * i >= n) break;
      const int c = 2 * i + (lane >> 4);
      const unsigned piece = __shfl_sync(0xffffffffu, mine, c) + (lane & 15);
      // Rows 2 apart: place_of's swizzle differs in known bits.
      cp_async_16_or_zero(tile + (place ^ ((2 * i & 6) << 4)) + i * 256, chunk + (size_t)piece * 16, c < n);
    }
    if (lane < n) {
      cp_async_16(smem_u32(s.offset[st] + lane * 16), chunk + (size_t)mine * 16 + 256);
      cp_async_4(smem_u32(&s.factor[st][lane]), chunk + (size_t)mine * 16 + 272);
    }
  }
};

}  // namespace w4a16
