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
// An activation chunk (128 columns of a token) is a record: the upper codes, the lower ones, the four groups' offsets
// -8 / c * sum, each as the sum of two bf16, and 512 / c. In each 16 columns, code 4q + 2p + h is column 8h + 2q + p, as
// the weights' words have it. The offsets are multiplied with the scales by the tensor cores, too, in bf16.
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
    return moe::pack_bf16(all, all - __bfloat162float(__float2bfloat16_rn(all)));
  }
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

// One record by one warp, whose lane holds 4 columns as bf16. `factor` is for lane 0, `offset`, two bf16 whose sum it is,
// for every eighth lane.
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
    moe::pdl_launch();
    moe::pdl_wait();
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

// Up to here the upper and lower codes of a tile's tokens share the right operand's 8 rows: one product makes both sums,
// which are added in the end.
constexpr int kPaired = 4;

// Where 16 bytes of a token's lower or upper codes go in a stage's right operand, whose tiles are swizzled.
template <class C>
__device__ __forceinline__ int place_of(int token, int part, bool lower, bool paired) {
  const int row = token + (lower && paired ? kPaired : 0);
  return (lower && !paired ? C::NMAX * 128 : 0) + row * 128 + ((part ^ (row & 7)) << 4);
}

// Clears the rows of a stage that no token fills, if it held another number of tokens last: zeros take the tensor cores
// less energy, and the card's limit of that bounds the speed. Of paired codes the lower ones' offsets must be zero.
// One warp has the stage to itself.
template <class C>
__device__ __forceinline__ void clear_unused(const Args& a, Smem<C>& s, int st, int n, int lane) {
  if (s.tokens[st] == n) return;
  const bool paired = n <= kPaired;
  const int rows = paired ? kPaired : (n + 7) / 8 * 8, part = lane & 15;
  const uint32_t tile = moe::smem_u32(s.b[st]);
#pragma unroll 1
  for (int c = n + (lane >> 4); c < rows; c += 2)
    moe::cp_async_16_or_zero(tile + place_of<C>(c, part & 7, part >> 3, paired), a.x, false);
  if (paired && lane >= kPaired && lane < 2 * kPaired)
    moe::cp_async_16_or_zero(moe::smem_u32(s.offset[st] + lane * 16), a.x, false);
  __syncwarp();
  if (lane == 0) s.tokens[st] = n;
  __syncwarp();
}

// Copies an item's records chunk by chunk, asynchronously: a lane every other token's 16 bytes `lane & 15` of the codes,
// and its own token's offsets and factor.
template <class C>
struct RecordCopy {
  const unsigned char* from;  // chunk 0 of row 0
  unsigned mine;              // where the lane's token's row begins, in 16 bytes
  int n, place;
  // `row` is that of token `lane`, `pitch` a row's records.
  __device__ __forceinline__ RecordCopy(const void* records, int pitch, int row, int n_, int lane)
      : from(static_cast<const unsigned char*>(records)), n(n_) {
    const int part = lane & 15;
    place = place_of<C>(lane >> 4, part & 7, part >> 3, n <= kPaired);
    mine = unsigned(row) * pitch * (kRecord / 16);
  }
  __device__ __forceinline__ void operator()(Smem<C>& s, int st, int kb, int lane) const {
    const uint32_t tile = moe::smem_u32(s.b[st]);
    const unsigned char* chunk = from + kb * kRecord;
    asm volatile("" : "+l"(chunk));  // one multiplication with addition a row
#pragma unroll
    for (int i = 0; i < C::NMAX / 2; ++i) {
      if (2 * i >= n) break;
      const int c = 2 * i + (lane >> 4);
      const unsigned piece = __shfl_sync(0xffffffffu, mine, c) + (lane & 15);
      // Rows 2 apart: place_of's swizzle differs in known bits.
      moe::cp_async_16_or_zero(tile + (place ^ ((2 * i & 6) << 4)) + i * 256, chunk + (size_t)piece * 16, c < n);
    }
    if (lane < n) {
      moe::cp_async_16(moe::smem_u32(s.offset[st] + lane * 16), chunk + (size_t)mine * 16 + 256);
      moe::cp_async_4(moe::smem_u32(&s.factor[st][lane]), chunk + (size_t)mine * 16 + 272);
    }
  }
};

// Keeps an operand's registers made before the fence that follows: the fence alone does not.
__device__ __forceinline__ void hold(uint32_t (&a)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) asm volatile("" : "+r"(a[r]));
}
// Descriptor of a right operand whose rows are 16 bytes, one after the other, which serve as both halves of its 16 columns.
__device__ __forceinline__ uint64_t desc_rows_of_16(const void* tile) {
  return (uint64_t(8) << 32) | (moe::smem_u32(tile) & 0x3FFFF) >> 4;
}

// sum += TILES of a chunk's 64-row tiles of weights, from `tile` on, x N tokens, by one warpgroup. Both products of a group
// of columns, and in the first round those of scales and offsets, are under way together.
template <int N, int TILES, bool PAIRED, class C>
__device__ __forceinline__ void multiply_chunk(const Smem<C>& s, int st, int tile, float (&sum)[4][N / 2]) {
  const int t = threadIdx.x & 127, q = t & 3;
  constexpr int GROUPS = N <= 8 ? 2 : 1, ROUNDS = 4 / GROUPS;  // groups whose products are started together
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  const unsigned char *words = s.w[st] + tile * 4096 + t * 16, *scales = s.scale[st] + tile * 512 + (t >> 2) * 16;
  uint4 word[TILES], scale[TILES];  // words of two groups, scales of all four
  uint32_t rows[TILES][4];          // scales as left operand: column 2g + p is group g's, whatever p
  auto fetch = [&](int half) {
#pragma unroll
    for (int m = 0; m < TILES; ++m) word[m] = *reinterpret_cast<const uint4*>(words + m * 4096 + half * 2048);
  };
  fetch(0);
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(scales + m * 512 + q * 4);
    rows[m][0] = __byte_perm(pair, 0, 0x1010), rows[m][1] = __byte_perm(pair, 0, 0x3232);
    rows[m][2] = rows[m][3] = 0;
    scale[m] = *reinterpret_cast<const uint4*>(scales + m * 512);
  }
  const uint32_t upper = WgmmaE4m3<N>::place(s.b[st]), lower = upper + C::NMAX * 8;
  const uint64_t offsets = desc_rows_of_16(s.offset[st]);
  float chunk[TILES][N / 2];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int first = round * GROUPS;
    uint32_t left[GROUPS][TILES][4];
    float part[GROUPS][TILES][N / 2];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        const bool odd = (first + i) & 1;
        const uint32_t one = odd ? word[m].z : word[m].x, two = odd ? word[m].w : word[m].y;
        left[i][m][0] = one & kLow, left[i][m][1] = (one >> 4) & kLow;
        left[i][m][2] = two & kLow, left[i][m][3] = (two >> 4) & kLow;
        hold(left[i][m]);
        if (round == 0 && i == 0) hold(rows[m]);
      }
    moe::wgmma_fence();
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
      for (int m = 0; m < TILES; ++m) WgmmaE4m3<N>::go(part[i][m], left[i][m], upper + 2 * (first + i), 0);
      if constexpr (!PAIRED)
#pragma unroll
        for (int m = 0; m < TILES; ++m) WgmmaE4m3<N>::go(part[i][m], left[i][m], lower + 2 * (first + i), 1);
    }
    if (round == 0)
#pragma unroll
      for (int m = 0; m < TILES; ++m) Wgmma<N>::bf16(sum[tile + m], rows[m], offsets);
    moe::wgmma_commit();
    if (first + GROUPS == 2) fetch(1);
    moe::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      if (round == 0) moe::fence_regs(sum[tile + m]);
      const uint32_t pair[4] = {scale[m].x, scale[m].y, scale[m].z, scale[m].w};
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        moe::fence_regs(part[i][m]);
        const float low = __uint_as_float(pair[first + i] << 16), high = __uint_as_float(pair[first + i] & 0xffff0000u);
#pragma unroll
        for (int r = 0; r < N / 2; ++r) {
          const float times = r & 2 ? high : low;
          chunk[m][r] = first + i ? fmaf(times, part[i][m][r], chunk[m][r]) : times * part[i][m][r];
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 factor = *reinterpret_cast<const float2*>(&s.factor[st][8 * j + 2 * (PAIRED ? q & 1 : q)]);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float& to = sum[tile + m][4 * j + r];
        to = fmaf(chunk[m][4 * j + r], r & 1 ? factor.y : factor.x, to);
      }
  }
}

// acc += weights of the warpgroup's rows x tokens. The two warpgroups take turns at the chunks, all 256 rows of each, so
// that what one waits for the other hides; then they exchange what belongs to the other's rows. Whose turn it is does
// not change a sum of two.
template <int NT, bool PAIRED, class C>
__device__ __forceinline__ void multiply_e4m3(Smem<C>& s, int nk, int& seq, float (&acc)[C::TILES][NT / 2]) {
  static_assert(C::WARPGROUPS == 2 && C::TILES == 2, "two warpgroups");
  const int tid = threadIdx.x - 128, wg = tid >> 7, lane = tid & 31, t = tid & 127;
  float sum[4][NT / 2];
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int r = 0; r < NT / 2; ++r) sum[m][r] = 0.f;
  const int end = seq + nk;
  for (seq += (seq ^ wg) & 1; seq < end; seq += 2) {
    const int st = seq % C::STAGES, parity = (seq / C::STAGES) & 1;
    moe::mbar_wait(&s.weights_full[st], parity);
    moe::mbar_wait(&s.full[st], parity);
    moe::fence_proxy_async();  // the tokens came by ordinary copies, and the tensor cores read them
    constexpr int kTogether = NT <= 16 ? 4 : NT <= 24 ? 2 : 1;  // tiles that the registers hold at once
#pragma unroll
    for (int m = 0; m < 4; m += kTogether) multiply_chunk<NT, kTogether, PAIRED, C>(s, st, m, sum);
    __syncwarp();
    if (lane == 0) moe::mbar_arrive(&s.empty[st]);
  }
  seq = end;
  moe::named_sync(1, C::CONSUMERS);  // nobody reads what was exchanged before
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int r = 0; r < NT / 2; ++r) s.exchange[wg][m * (NT / 2) + r][t] = wg ? sum[m][r] : sum[2 + m][r];
  moe::named_sync(1, C::CONSUMERS);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int r = 0; r < NT / 2; ++r) {
      acc[m][r] = (wg ? sum[2 + m][r] : sum[m][r]) + s.exchange[1 - wg][m * (NT / 2) + r][t];
      if constexpr (PAIRED) acc[m][r] += __shfl_xor_sync(0xffffffffu, acc[m][r], 2);
    }
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
    uint32_t offset[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      offset[k] = power.offset(s.sums[tid][k] * (1.f / 512.f));
      s.sums[tid][k] = 0;
    }
    s.amax[tid] = 0;
    if (tid < n) {
      __stcg(reinterpret_cast<uint4*>(to + tid * pitch + 256), make_uint4(offset[0], offset[1], offset[2], offset[3]));
      __stcg(reinterpret_cast<float*>(to + tid * pitch + 272), power.product_factor());
    }
  }
}

}  // namespace w4a16
