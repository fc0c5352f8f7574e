// MLA decode attention over e4m3 (mla_fp8.cuh): the two warpgroups that sum the values in float16, 256 columns each.
#pragma once
#include "mla_fp8_scores.cuh"

namespace mla {

// d += A[64, 16] B[N, 16]^T in float16, A in registers, rows of B of 128 bytes.
template <int N>
struct Values;
#define MLA_VALUES(N, R, A0, A1, A2, A3, B, ...)                                                                   \
  template <>                                                                                                      \
  struct Values<N> {                                                                                               \
    static __device__ __forceinline__ void go(float (&d)[R], const uint32_t (&a)[4], uint32_t b) {                 \
      asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%" B ", " MLA_ROWS_128 "};\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32.f16.f16 {" PTX_S##R "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, b, 1, 1, 1, 0;\n}\n"     \
                   : __VA_ARGS__                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                          \
    }                                                                                                              \
  };
MLA_VALUES(16, 8, "8", "9", "10", "11", "12", PTX_D8(d, 0))
MLA_VALUES(32, 16, "16", "17", "18", "19", "20", PTX_D16(d, 0))
MLA_VALUES(64, 32, "32", "33", "34", "35", "36", PTX_D32(d, 0))
#undef MLA_VALUES
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Four e4m3 values as float16, two and two.
__device__ __forceinline__ void halves_of_e4m3(uint32_t fp8, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(fp8));
}
// Fragments are taken, and the tensor cores asked for their sums, so many of 16 rows together; with 64 heads there are
// no registers for two tiles'.
template <class M>
constexpr int kTaken = M::kHeads > 32 ? 2 : 4;

// As many rows' values, from `first` on, of a tile of 64 columns, of which this warp has 16; those from row `rows` on
// become zeros, as zero times NaN is NaN. A matrix of ldmatrix is 8 rows of 8 pairs of columns: a lane gets a pair of
// columns of two rows.
template <int STEPS>
__device__ __forceinline__ void load_values(uint32_t (&raw)[STEPS * 2], uint32_t stage, int half, int tile, int first,
                                            int rows) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t at =
      stage + (half * 2 + tile / 2) * kWideBox + (first + lane) * 128 + ((tile % 2 * 4 + warp) ^ (lane % 8)) * 16;
#pragma unroll
  for (int k = 0; k < STEPS / 2; ++k) {
    uint32_t four[4];
    ldmatrix_x4_trans(four, at + k * 32 * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[4 * k + i] = four[i];
  }
  if (rows < kRows) {
#pragma unroll
    for (int i = 0; i < STEPS * 2; ++i) {
      const int row = first + i * 8 + lane % 4 * 2;
      if (row >= rows) raw[i] &= 0xffff0000u;
      if (row + 1 >= rows) raw[i] &= 0x0000ffffu;
    }
  }
}

// Fragments in float16: the byte permutation makes of a pair of columns one's two rows and the other's. Row g of a
// fragment is the first column of pair g, row g + 8 the second one.
template <int STEPS>
__device__ __forceinline__ void take_values(uint32_t (&left)[STEPS][4], const uint32_t (&raw)[STEPS * 2]) {
#pragma unroll
  for (int i = 0; i < STEPS * 2; ++i)
    halves_of_e4m3(__byte_perm(raw[i], 0, 0x3120), left[i / 2][i % 2 * 2], left[i / 2][i % 2 * 2 + 1]);
}

// An item's values of this warpgroup's half: the result in bfloat16, or a part, normalised and so below 448, in
// float16.
template <int HEADS>
__device__ __forceinline__ void store_values(const Arguments& a, const float (&acc)[4][HEADS / 2], const float* inverse,
                                             int half, int request, int64_t item, bool alone) {
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
        const float x = acc[tile][eight * 4 + j] * factor, y = acc[tile][eight * 4 + j + 2] * factor;
        to[(head * kLatent + tile * 64) / 2] = alone ? pack_bf16(x, y) : pack_f16(x, y);
      }
    }
}

// Sums shrink where a head's largest score has grown.
template <int SUMS>
__device__ __forceinline__ void shrink_sums(float (&acc)[4][SUMS], const float* shrinks) {
  const float* shrink = shrinks + threadIdx.x % 4 * 2;
#pragma unroll
  for (int eight = 0; eight < SUMS / 4; ++eight) {
    const float2 two = *reinterpret_cast<const float2*>(shrink + eight * 8);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[tile][4 * eight + j] *= j % 2 ? two.y : two.x;
  }
}

// The values of a step's turn, `n` steps of the block before it; its first are awaited.
template <class M>
__device__ __forceinline__ void load_turn(M& m, uint32_t (&raw)[kTaken<M> * 2], int half, int n, int turn, int rows) {
  constexpr int kTurns = 4 / kTaken<M>;
  const int stage = n % M::kDepth;
  if (turn == 0) mbar_wait(&m.full[stage], n / M::kDepth & 1);
  load_values<kTaken<M>>(raw, smem_u32(m.stage[stage]), half, turn / kTurns, turn % kTurns * kTaken<M> * 16, rows);
}

template <class M>
__device__ __forceinline__ void value_items(M& m, const Arguments& a, const __nv_bfloat16* query, const Items& items,
                                            int half) {
  constexpr int kSteps = kTaken<M>, kTurns = 4 / kSteps, kAll = 4 * kTurns;
  const int lane = threadIdx.x % 32;
  take_first_query(m, a, query, items);
  for (int number = items.begin, n = 0; number < items.end; ++number) {
    // Read again behind the steps: registers are short in between.
    const Part part(item_of(a, number));
    const int count = part.count, rows = part.length - part.first * kRows;
    float acc[4][M::kHeads / 2] = {};
    uint32_t left[2][kSteps][4], raw[kSteps * 2];
    load_turn(m, raw, half, n, 0, rows);
    take_values(left[0], raw);
    for (int i = 0; i < count; ++i, ++n) {
      const int from = n % 2, seen = rows - i * kRows;
      const uint32_t weights = lower_half(m.weights[from]);
      mbar_wait(&m.weights_full[from], n / 2 & 1);
      if (i > 0 && m.grown[from] != 0) shrink_sums(acc, m.shrink[from]);
#pragma unroll
      for (int turn = 0; turn < kAll; ++turn) {
        // The next turn's values are on their way while the tensor cores take these.
        const bool more = turn + 1 < kAll || i + 1 < count;
        if (turn + 1 < kAll) load_turn(m, raw, half, n, turn + 1, seen);
        else if (more) load_turn(m, raw, half, n + 1, 0, seen - kRows);
        float (&sum)[M::kHeads / 2] = acc[turn / kTurns];
        fence_regs(sum);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
          Values<M::kHeads>::go(sum, left[turn % 2][k], weights + (turn % kTurns * kSteps + k) * 2);
        wgmma_commit();
        // The last fragments are in registers: their values have been asked for.
        if (turn + 1 == kAll && lane == 0) mbar_arrive(&m.empty[n % M::kDepth]);
        wgmma_wait<1>();  // the fragments before these have been taken: their registers are free
        if (more) take_values(left[(turn + 1) % 2], raw);
      }
      wgmma_wait<0>();
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) fence_regs(acc[tile]);
      if (i + 1 == count) {
        const PlannedItem item = item_of(a, number);
        store_values<M::kHeads>(a, acc, m.inverse[from], half, item.request, number, Work<true>(number, item).alone(a));
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(&m.weights_empty[from]);
    }
  }
}

}  // namespace mla
