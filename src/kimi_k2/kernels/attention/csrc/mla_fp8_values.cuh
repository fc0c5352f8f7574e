// MLA decode attention in e4m3 (mla_fp8.cuh): the two warpgroups that sum the values, 256 columns each.
#pragma once
#include "mla_fp8_memory.cuh"

namespace mla {

// d (+)= A[64, 32] B[N, 32]^T in e4m3, A in registers, rows of 64 bytes; accumulate 0 overwrites d.
template <int N>
struct Fp8Values;
#define MLA_VALUES(N, R, A0, A1, A2, A3, B, P, ...)                                                                \
  template <>                                                                                                      \
  struct Fp8Values<N> {                                                                                            \
    static __device__ __forceinline__ void go(float (&d)[R], const uint32_t (&a)[4], uint32_t b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" P ", 0;\nmov.b64 b, {%" B ", " MLA_ROWS_64   \
                   "};\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" PTX_S##R                       \
                   "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, b, p, 1, 1;\n}\n"                                     \
                   : __VA_ARGS__                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));                         \
    }                                                                                                              \
  };
MLA_VALUES(8, 4, "4", "5", "6", "7", "8", "9", PTX_D4(d, 0))
MLA_VALUES(16, 8, "8", "9", "10", "11", "12", "13", PTX_D8(d, 0))
MLA_VALUES(32, 16, "16", "17", "18", "19", "20", "21", PTX_D16(d, 0))
MLA_VALUES(64, 32, "32", "33", "34", "35", "36", "37", PTX_D32(d, 0))
#undef MLA_VALUES
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The fragments of a tile of 64 columns, of which this warp has 16, of all 64 rows; those from `rows` on become zeros,
// as zero times NaN is NaN. A matrix of ldmatrix is 8 rows of 8 pairs of columns: a lane gets a pair of columns of two
// rows, and the byte permutations make of two such one column of four rows. Row g of a fragment is the first column of
// pair g, row g + 8 the second one.
__device__ __forceinline__ void take_values(uint32_t (&left)[2][4], uint32_t stage, int half, int tile, int rows) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t at = stage + (half * 2 + tile / 2) * kWideBox + lane * 128 + ((tile % 2 * 4 + warp) ^ (lane % 8)) * 16;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t raw[4];
    ldmatrix_x4_trans(raw, at + k * 32 * 128);
    if (rows < kRows) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = k * 32 + i * 8 + lane % 4 * 2;
        if (first >= rows) raw[i] &= 0xffff0000u;
        if (first + 1 >= rows) raw[i] &= 0x0000ffffu;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      left[k][2 * i] = __byte_perm(raw[2 * i], raw[2 * i + 1], 0x6420);
      left[k][2 * i + 1] = __byte_perm(raw[2 * i], raw[2 * i + 1], 0x7531);
    }
  }
}

// So many parts have the heads: with 64 one part's sums are added up while the tensor cores have the other's, for which
// there are registers.
template <class M>
constexpr int kParts = M::kHeads > 32 ? 2 : 1;
template <class M>
constexpr int kSums = M::kHeads / 2 / kParts<M>;

// Asks the tensor cores for a tile's columns of a part of the heads. Small terms first.
template <class M>
__device__ __forceinline__ void ask_values(float (&sum)[kSums<M>], const uint32_t (&left)[2][4], uint32_t weights) {
  fence_regs(sum);
  wgmma_fence();
#pragma unroll
  for (int term = M::kTerms - 1; term >= 0; --term)
#pragma unroll
    for (int k = 0; k < 2; ++k)
      Fp8Values<2 * kSums<M>>::go(sum, left[k], weights + term * (M::kWeights / 16) + k * 2,
                                  k > 0 || term < M::kTerms - 1);
  wgmma_commit();
}

// acc = acc * shrink + sum in float32, once no more than so many parts are asked for: the tensor cores' own sums over
// e4m3 keep fewer bits.
template <int PENDING, int SUMS>
__device__ __forceinline__ void add_up(const float* shrinks, float (&acc)[SUMS], float (&sum)[SUMS]) {
  wgmma_wait<PENDING>();
  fence_regs(sum);
  const float* shrink = shrinks + threadIdx.x % 4 * 2;
#pragma unroll
  for (int eight = 0; eight < SUMS / 4; ++eight) {
    const float2 two = *reinterpret_cast<const float2*>(shrink + eight * 8);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      acc[4 * eight + j] = fmaf(acc[4 * eight + j], j % 2 ? two.y : two.x, sum[4 * eight + j]);
  }
  fence_regs(acc);  // what shrinks has been read before the weights' place is handed back
}

// An item's values of this warpgroup's half: the result in bfloat16, or a part, normalised and so below 448, in
// float16.
template <class M>
__device__ __forceinline__ void store_values(const Arguments& a, const float (&acc)[4][kParts<M>][kSums<M>],
                                             const float* inverse, int half, int request, int64_t item, bool alone) {
  constexpr int HEADS = M::kHeads, kEights = kSums<M> / 4;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, pair = lane % 4 * 2;
  const int64_t place = (alone ? request : item) * HEADS * kLatent + half * 256 + warp * 16 + lane / 4 * 2;
  uint32_t* const to = alone ? reinterpret_cast<uint32_t*>(a.out + place)
                             : reinterpret_cast<uint32_t*>(static_cast<__half*>(a.parts) + place);
#pragma unroll
  for (int eight = 0; eight < HEADS / 8; ++eight)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = eight * 8 + pair + j;
      const float factor = inverse[head];
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const float* sums = acc[tile][eight / kEights] + eight % kEights * 4 + j;
        const float x = sums[0] * factor, y = sums[2] * factor;
        to[(head * kLatent + tile * 64) / 2] = alone ? pack_bf16(x, y) : pack_f16(x, y);
      }
    }
}

template <class M>
__device__ __forceinline__ void value_items(M& m, const Arguments& a, const Items& items, int half) {
  constexpr int kLast = kParts<M> - 1;
  const int lane = threadIdx.x % 32;
  for (int number = items.begin, n = 0; number < items.end; ++number) {
    // Read again behind the steps: registers are short in between.
    const Part part(item_of(a, number));
    const int count = part.count, rows = part.length - part.first * kRows;
    float acc[4][kParts<M>][kSums<M>] = {};
    for (int i = 0; i < count; ++i, ++n) {
      const int stage = n % M::kDepth, from = n % 2;
      mbar_wait(&m.full[stage], n / M::kDepth & 1);
      const uint32_t values = smem_u32(m.stage[stage]), weights = lower_half(m.weights[from]);
      uint32_t left[2][2][4];
      float sum[kParts<M>][kSums<M>];
      take_values(left[0], values, half, 0, rows - i * kRows);
      mbar_wait(&m.weights_full[from], n / 2 & 1);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        ask_values<M>(sum[0], left[tile % 2], weights);
        // The tile before has been taken now: its fragments' registers are free.
        if (kLast && tile > 0) add_up<1>(m.shrink[from] + 32 * kLast, acc[tile - 1][kLast], sum[kLast]);
        if (kLast) ask_values<M>(sum[kLast], left[tile % 2], weights + kLast * 32 * kRows / 16);
        if (tile < 3) take_values(left[(tile + 1) % 2], values, half, tile + 1, rows - i * kRows);
        // The last fragments are in registers: their values have been asked for.
        if (tile == 3 && lane == 0) mbar_arrive(&m.empty[stage]);
        add_up<kLast>(m.shrink[from], acc[tile][0], sum[0]);
      }
      if (kLast) add_up<0>(m.shrink[from] + 32 * kLast, acc[3][kLast], sum[kLast]);
      if (i + 1 == count) {
        const PlannedItem item = item_of(a, number);
        store_values<M>(a, acc, m.inverse[from], half, item.request, number, Work<true>(number, item).alone(a));
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(&m.weights_empty[from]);
    }
  }
}

}  // namespace mla
