// Few tokens an expert: INT4 weights as e4m3 operands, which takes a fifth of the instructions that bf16 ones take, and
// rounds no weight.
//
// A nibble n with zeros above it is the e4m3 code of n / 512, so a word of 8 weights becomes two registers of the left
// operand by a mask each. A bf16 activation, scaled by a power of two, is the sum of two e4m3 codes: the upper half of
// its significand and the lower. Products of a group of 32 columns are summed by the tensor cores; then the group's
// scale, the activations' scale and the 8 that symmetric INT4 is stored with are applied in float32:
//
//     w . x = sum over groups of scale * (512 / c * acc - 8 / c * sum of codes),   c: the activations' power of two.
//
// An activation chunk (128 columns of a token) is a record: the upper codes, the lower ones, 512 / c, and the four
// groups' -8 / c * sum. In each 16 columns, code 4q + 2p + h is column 8h + 2q + p, as the weights' words have it.
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
  __device__ __forceinline__ float offset(float sum_of_codes) const { return -8.f * down * sum_of_codes; }
};

// Two values as codes; adds what the codes stand for to `sum`, exactly.
__device__ __forceinline__ void split(float a, float b, const Power& power, uint32_t& upper, uint32_t& lower,
                                      float& sum) {
  a *= power.up, b *= power.up;
  upper = moe::to_e4m3(a, b);
  const float2 u = moe::from_e4m3(upper);
  lower = moe::to_e4m3(a - u.x, b - u.y);
  const float2 l = moe::from_e4m3(lower);
  sum += (u.x + l.x) + (u.y + l.y);
}

// One record by one warp, whose lane holds 4 columns as bf16. `factor` is for lane 0, `offset` for every eighth lane.
struct Encoded {
  uint32_t upper, lower;  // word (lane / 4) * 4 + `word` of the 32
  int word;
  float factor, offset;
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

// Before the main launch of many pairs: every token's records, a warp each.
__global__ void __launch_bounds__(256) encode_kernel(const __grid_constant__ Args a) {
  const int lane = threadIdx.x & 31;
  const size_t record = (size_t)blockIdx.x * 8 + (threadIdx.x >> 5);
  if (a.pdl) {
    moe::pdl_launch();
    moe::pdl_wait();
  }
  if (record >= (size_t)a.tokens * (a.hidden / 128)) return;
  const Encoded e(__ldcg(reinterpret_cast<const uint2*>(a.x) + record * 32 + lane), lane);
  unsigned char* to = reinterpret_cast<unsigned char*>(a.xs) + record * kRecord;
  uint32_t* words = reinterpret_cast<uint32_t*>(to) + (lane >> 2) * 4 + e.word;
  words[0] = e.upper;
  words[32] = e.lower;
  float* factors = reinterpret_cast<float*>(to + 256);
  if (lane == 0) factors[0] = e.factor;
  if (lane % 8 == 0) factors[1 + lane / 8] = e.offset;
}

// The tokens of a stage are there.
template <class C>
__device__ __forceinline__ void announce(Smem<C>& s, int st, int lane) {
  moe::fence_proxy_async();
  __syncwarp();
  if (lane == 0) moe::mbar_arrive(&s.full[st]);
}

// The same into a stage's tiles of the right operand, from tokens as they are.
template <class C>
__device__ __forceinline__ void encode_tokens(const Args& a, Smem<C>& s, int st, int row, int n, int kb, int lane) {
  constexpr int kTogether = 2;
  for (int c0 = 0; c0 < n; c0 += kTogether) {
    uint2 raw[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int r = __shfl_sync(0xffffffffu, row, min(c0 + i, n - 1));
      raw[i] = __ldg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(a.x) + (size_t)r * a.hidden +
                                                    kb * 128) + lane);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int c = c0 + i;
      if (c >= n) break;
      const Encoded e(raw[i], lane);
      uint32_t* words = reinterpret_cast<uint32_t*>(s.b[st] + c * 128 + (((lane >> 2) ^ (c & 7)) << 4)) + e.word;
      words[0] = e.upper;
      words[C::NMAX * 32] = e.lower;
      if (lane == 0) s.factor[st][c][0] = e.factor;
      if (lane % 8 == 0) s.factor[st][c][1 + lane / 8] = e.offset;
    }
  }
  announce(s, st, lane);
}

// Records by asynchronous copies, not waited for; `from` is a chunk of row 0, `pitch` a row's bytes.
template <class C>
__device__ __forceinline__ void copy_records(Smem<C>& s, int st, const unsigned char* from, size_t pitch, int row,
                                             int n, int lane) {
  const uint32_t tile = moe::smem_u32(s.b[st]);
  const int part = lane & 15;
  for (int c0 = 0; c0 < n; c0 += 2) {
    const int c = c0 + (lane >> 4), r = __shfl_sync(0xffffffffu, row, min(c, n - 1));
    if (c < n)
      moe::cp_async_16(tile + (part >> 3) * (C::NMAX * 128) + c * 128 + (((part & 7) ^ (c & 7)) << 4),
                       from + r * pitch + part * 16);
  }
  if (lane < n) {
    const uint32_t factors = moe::smem_u32(s.factor[st][lane]);
    moe::cp_async_16(factors, from + row * pitch + 256);
    moe::cp_async_16(factors + 16, from + row * pitch + 272);
  }
  moe::cp_async_commit();
}

// acc += weights of the warpgroup's rows x tokens. The two warpgroups take turns at the chunks, all 256 rows of each, so
// that what one waits for the other hides; then they exchange what belongs to the other's rows. Whose turn it is does
// not change a sum of two.
template <int NT, class C>
__device__ __forceinline__ void multiply_e4m3(Smem<C>& s, int nk, int& seq, float (&acc)[C::TILES][NT / 2]) {
  static_assert(C::WARPGROUPS == 2 && C::TILES == 2, "two warpgroups");
  const int tid = threadIdx.x - 128, wg = tid >> 7, lane = tid & 31, t = tid & 127;
  constexpr int GROUPS = NT <= 8 ? 2 : 1, ROUNDS = 4 / GROUPS;  // groups whose products are started together
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  float sum[4][NT / 2];
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int r = 0; r < NT / 2; ++r) sum[m][r] = 0.f;
  for (const int end = seq + nk; seq < end; ++seq) {
    if ((seq & 1) != wg) continue;
    const int st = seq % C::STAGES, parity = (seq / C::STAGES) & 1;
    moe::mbar_wait(&s.weights_full[st], parity);
    const unsigned char *words = s.w[st] + t * 16, *scales = s.scale[st] + (t >> 2) * 16;
    uint32_t word[4][2 * GROUPS], scale[4][GROUPS];
    auto fetch = [&](int first) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const unsigned char* at = words + m * 4096 + (first >> 1) * 2048;
        if constexpr (GROUPS == 2) {
          const uint4 four = *reinterpret_cast<const uint4*>(at);
          const uint2 two = *reinterpret_cast<const uint2*>(scales + m * 512 + first * 4);
          word[m][0] = four.x, word[m][1] = four.y, word[m][2] = four.z, word[m][3] = four.w;
          scale[m][0] = two.x, scale[m][1] = two.y;
        } else {
          const uint2 two = *reinterpret_cast<const uint2*>(at + (first & 1) * 8);
          word[m][0] = two.x, word[m][1] = two.y;
          scale[m][0] = *reinterpret_cast<const uint32_t*>(scales + m * 512 + first * 4);
        }
      }
    };
    fetch(0);
    moe::mbar_wait(&s.full[st], parity);
    const uint32_t upper = WgmmaE4m3<NT>::place(s.b[st]), lower = upper + (C::NMAX * 128 >> 4);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int first = round * GROUPS;
      uint32_t left[GROUPS][4][4];
      float part[GROUPS][4][NT / 2], low[GROUPS][4], high[GROUPS][4];
#pragma unroll
      for (int i = 0; i < GROUPS; ++i)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const uint32_t one = word[m][2 * i], two = word[m][2 * i + 1];
          left[i][m][0] = one & kLow, left[i][m][1] = (one >> 4) & kLow;
          left[i][m][2] = two & kLow, left[i][m][3] = (two >> 4) & kLow;
#pragma unroll
          for (int r = 0; r < 4; ++r) asm volatile("" : "+r"(left[i][m][r]));  // wgmma_fence alone does not hold it
          low[i][m] = __uint_as_float(scale[m][i] << 16), high[i][m] = __uint_as_float(scale[m][i] & 0xffff0000u);
        }
      moe::wgmma_fence();
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
        for (int m = 0; m < 4; ++m) WgmmaE4m3<NT>::go(part[i][m], left[i][m], upper + 2 * (first + i), 0);
#pragma unroll
        for (int m = 0; m < 4; ++m) WgmmaE4m3<NT>::go(part[i][m], left[i][m], lower + 2 * (first + i), 1);
      }
      moe::wgmma_commit();
      if (round + 1 < ROUNDS) fetch(first + GROUPS);
      float factor[NT / 8][2], offset[GROUPS][NT / 8][2];
#pragma unroll
      for (int j = 0; j < NT / 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* of = s.factor[st][8 * j + 2 * (lane & 3) + r];
          factor[j][r] = of[0];
#pragma unroll
          for (int i = 0; i < GROUPS; ++i) offset[i][j][r] = of[1 + first + i];
        }
      moe::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < GROUPS; ++i)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          moe::fence_regs(part[i][m]);
#pragma unroll
          for (int j = 0; j < NT / 8; ++j)
#pragma unroll
            for (int r = 0; r < 4; ++r)
              sum[m][4 * j + r] = fmaf(r < 2 ? low[i][m] : high[i][m],
                                       fmaf(part[i][m][4 * j + r], factor[j][r & 1], offset[i][j][r & 1]),
                                       sum[m][4 * j + r]);
        }
    }
    __syncwarp();
    if (lane == 0) moe::mbar_arrive(&s.empty[st]);
  }
  moe::named_sync(1, C::CONSUMERS);  // nobody reads what was exchanged before
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int r = 0; r < NT / 2; ++r) s.exchange[wg][m * (NT / 2) + r][t] = wg ? sum[m][r] : sum[2 + m][r];
  moe::named_sync(1, C::CONSUMERS);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int r = 0; r < NT / 2; ++r)
      acc[m][r] = (wg ? sum[2 + m][r] : sum[m][r]) + s.exchange[1 - wg][m * (NT / 2) + r][t];
}

// First stage's end: 128 columns of the intermediate, rounded to bf16, as a record of each of the tile's tokens.
template <int NT, class C>
__device__ __forceinline__ void store_records(const Args& a, Smem<C>& s, const Item& it, const int4& tile,
                                              const float (&acc)[C::TILES][NT / 2]) {
  const int tid = threadIdx.x - 128, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int first = (warp >> 2) * C::TILES, w = warp & 3, n = tile.z;  // a 64-row tile makes a group of 32 columns
  float2 value[C::TILES][NT / 8];                                     // token 8j + g, columns 2q and 2q + 1 of 8
#pragma unroll
  for (int j = 0; j < NT / 8; ++j) {
    float amax = 0;
#pragma unroll
    for (int m = 0; m < C::TILES; ++m) {
      const uint32_t u = activate(acc[m] + 4 * j);
      value[m][j] = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&u));
      amax = fmaxf(amax, fmaxf(fabsf(value[m][j].x), fabsf(value[m][j].y)));
    }
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    if (q == 0) atomicMax(&s.amax[8 * j + g], __float_as_uint(amax));
  }
  moe::named_sync(1, C::CONSUMERS);
#pragma unroll
  for (int j = 0; j < NT / 8; ++j) {
    const int c = 8 * j + g;
    const Power power(__uint_as_float(s.amax[c]));
#pragma unroll
    for (int m = 0; m < C::TILES; ++m) {
      uint32_t upper, lower;
      float sum = 0;
      split(value[m][j].x, value[m][j].y, power, upper, lower, sum);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      // Codes are multiples of 2^-9 below 2^9: their sum is exact as an integer, whatever its order.
      if (q == 0) atomicAdd(&s.sums[c][first + m], __float2int_rn(sum * 512.f));
      unsigned char* to = s.records[c] + (first + m) * 32 + (w >> 1) * 16 + 4 * q + (w & 1);
      to[0] = upper, to[2] = upper >> 8;
      to[128] = lower, to[130] = lower >> 8;
    }
  }
  moe::named_sync(1, C::CONSUMERS);
  const size_t pitch = (size_t)(a.inter / 128) * kRecord;
  unsigned char* to = static_cast<unsigned char*>(a.inter_q) + tile.y * pitch + it.group * kRecord;
  for (int i = tid; i < n * 16; i += C::CONSUMERS)
    __stcg(reinterpret_cast<uint4*>(to + (i >> 4) * pitch) + (i & 15),
           reinterpret_cast<const uint4*>(s.records[i >> 4])[i & 15]);
  if (tid < C::NMAX) {  // also what columns without a token left
    const Power power(__uint_as_float(s.amax[tid]));
    float offset[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      offset[k] = power.offset(s.sums[tid][k] * (1.f / 512.f));
      s.sums[tid][k] = 0;
    }
    s.amax[tid] = 0;
    if (tid < n) {
      float4* factors = reinterpret_cast<float4*>(to + tid * pitch + 256);
      __stcg(factors, make_float4(power.product_factor(), offset[0], offset[1], offset[2]));
      __stcg(factors + 1, make_float4(offset[3], 0.f, 0.f, 0.f));
    }
  }
}

}  // namespace w4a16
