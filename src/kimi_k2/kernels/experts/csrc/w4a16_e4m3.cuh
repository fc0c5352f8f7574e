// Few tokens an expert: four-bit weights as e4m3 operands, which take fewer instructions than bf16 ones; no weight is
// rounded. What follows is INT4's way; four-bit floats have no offsets, and with groups of 16 columns an MMA's 32 are a
// group's upper values and its lower ones.
//
// A nibble n with zeros above it is the e4m3 value n / 512, so a word of 8 weights becomes two registers of the left
// operand by a mask each. A bf16 activation, scaled by a power of two, is the sum of two e4m3 values: the upper half of
// its significand and the lower. Products of a group of 32 columns are summed by the tensor cores; scales are applied
// to the sums in float32, and the 8 that symmetric INT4 is stored with comes in with the activations:
//
//     w . x = sum over groups of scale * (512 / c * acc - 8 / c * sum of values),   c: the activations' power of two.
//
// -8 / c * sum is an offset of a token's group (w4a16_records.cuh), in bf16, which the tensor cores multiply with the
// scales as they are.
#pragma once
#include "w4a16_records.cuh"

namespace w4a16 {

// Keeps an operand's registers made before the fence that follows: the fence alone does not.
__device__ __forceinline__ void hold(uint32_t (&a)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) asm volatile("" : "+r"(a[r]));
}
// Descriptor of a right operand whose rows are 16 bytes, side by side, and serve as both halves of its 16 columns.
__device__ __forceinline__ uint64_t desc_rows_of_16(const void* tile) {
  return (uint64_t(8) << 32) | (smem_u32(tile) & 0x3FFFF) >> 4;
}

// sum += TILES of a chunk's 64-row tiles of weights, from `tile` on, x N tokens, by one warpgroup. Both MMAs of a
// group of columns, and in the first round those of scales and offsets, are under way together.
template <int N, int TILES, bool PAIRED, class C>
__device__ __forceinline__ void multiply_chunk(const Smem<C>& s, int st, int tile, float (&sum)[4][N / 2]) {
  using F = typename C::Format;
  using Row = typename F::Row;
  const int t = threadIdx.x & 127, q = t & 3;
  // Groups of 32 columns whose MMAs are started together.
  constexpr int SPLIT = C::SPLIT, GROUPS = N * SPLIT <= 8 ? 2 : 1, ROUNDS = 4 / GROUPS;
  const unsigned char* words = s.w[st] + tile * 4096 + t * 16;
  const unsigned char* scales = s.scale[st] + tile * kTileScales<F> + (t >> 2) * sizeof(Row);
  uint4 word[TILES];  // of two groups
  Row scale[TILES];
  uint32_t rows[F::OFFSET ? TILES : 1][4];  // scales as left operand: column 2g + p is group g's, whatever p
  auto fetch = [&](int half) {
#pragma unroll
    for (int m = 0; m < TILES; ++m) word[m] = *reinterpret_cast<const uint4*>(words + m * 4096 + half * 2048);
  };
  fetch(0);
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    if constexpr (F::OFFSET) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(scales + m * kTileScales<F> + q * F::GROUPS / 4 * 4);
      rows[m][0] = __byte_perm(pair, 0, 0x1010), rows[m][1] = __byte_perm(pair, 0, 0x3232);
      rows[m][2] = rows[m][3] = 0;
      hold(rows[m]);
      fence_regs(sum[tile + m]);
    }
    scale[m] = *reinterpret_cast<const Row*>(scales + m * kTileScales<F>);
  }
  const uint32_t upper = WgmmaE4m3Rs<N>::place(s.b[st]), lower = upper + C::NMAX * 8;
  const uint64_t offsets = desc_rows_of_16(s.offset[st]);
  float chunk[TILES][N / 2];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int first = round * GROUPS;
    uint32_t left[GROUPS][SPLIT][TILES][4];
    float part[GROUPS][SPLIT][TILES][N / 2];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        const bool odd = (first + i) & 1;
        const uint32_t one = odd ? word[m].z : word[m].x, two = odd ? word[m].w : word[m].y;
#pragma unroll
        for (int half = 0; half < SPLIT; ++half) {
          uint32_t (&codes)[4] = left[i][half][m];
          F::codes(codes[0], codes[1], half ? two : one);
          if constexpr (SPLIT == 1) F::codes(codes[2], codes[3], two);
          else codes[2] = codes[0], codes[3] = codes[1];  // for the lower values
          hold(codes);
        }
      }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
      for (int half = 0; half < SPLIT; ++half) {
        const int at = (first + i) * SPLIT + half;  // of the operand's pieces of 32 values, four a tile
#pragma unroll
        for (int m = 0; m < TILES; ++m)
          WgmmaE4m3Rs<N>::go(part[i][half][m], left[i][half][m], (at < 4 ? upper : lower) + 2 * (at & 3), 0);
      }
      if constexpr (!PAIRED && SPLIT == 1)
#pragma unroll
        for (int m = 0; m < TILES; ++m) WgmmaE4m3Rs<N>::go(part[i][0][m], left[i][0][m], lower + 2 * (first + i), 1);
    }
    if (F::OFFSET && round == 0)
#pragma unroll
      for (int m = 0; m < TILES; ++m) WgmmaBf16Rs<N>::go(sum[tile + m], rows[m], offsets);
    wgmma_commit();
    if (first + GROUPS == 2) fetch(1);
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      if (F::OFFSET && round == 0) fence_regs(sum[tile + m]);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i)
#pragma unroll
        for (int half = 0; half < SPLIT; ++half) {
          const float (&of)[N / 2] = part[i][half][m];
          fence_regs(part[i][half][m]);
          float low, high;
          F::times(scale[m], first + i, half, low, high);
#pragma unroll
          for (int r = 0; r < N / 2; ++r) {
            const float times = r & 2 ? high : low;
            chunk[m][r] = first + i + half ? fmaf(times, of[r], chunk[m][r]) : times * of[r];
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
        float of = chunk[m][4 * j + r];
        if constexpr (F::kSum != 1.f) of *= F::kSum;
        to = fmaf(of, r & 1 ? factor.y : factor.x, to);
      }
  }
}

// acc += weights of the warpgroup's rows x tokens. The two warpgroups take turns at the chunks, all 256 rows of each,
// so that what one waits for the other hides; then they exchange what belongs to the other's rows. Whose turn it is
// does not change a sum of two.
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
    mbar_wait(&s.weights_full[st], parity);
    mbar_wait(&s.full[st], parity);
    fence_proxy_async();  // the tokens came by ordinary asynchronous copies
    // Tiles that the registers hold at once.
    constexpr int kTogether = NT * C::SPLIT <= 16 ? 4 : NT <= 24 ? 2 : 1;
#pragma unroll
    for (int m = 0; m < 4; m += kTogether) multiply_chunk<NT, kTogether, PAIRED, C>(s, st, m, sum);
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.empty[st]);
  }
  seq = end;
  named_sync(1, C::CONSUMERS);  // nobody reads what was exchanged before
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int r = 0; r < NT / 2; ++r) s.exchange[wg][m * (NT / 2) + r][t] = wg ? sum[m][r] : sum[2 + m][r];
  named_sync(1, C::CONSUMERS);
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
  float2 value[C::TILES][NT / 8];                                      // token 8j + g, columns 2q and 2q + 1 of 8
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
  named_sync(1, C::CONSUMERS);
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
      // Values are multiples of 2^-9 below 2^9: their sum is exact as an integer, whatever its order.
      if (q == 0) atomicAdd(&s.sums[c][first + m], __float2int_rn(sum * 512.f));
      unsigned char* to = s.records[c] + (first + m) * 32 + (w >> 1) * 16 + 4 * q + (w & 1);
      to[0] = upper, to[2] = upper >> 8;
      to[128] = lower, to[130] = lower >> 8;
    }
  }
  named_sync(1, C::CONSUMERS);
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
