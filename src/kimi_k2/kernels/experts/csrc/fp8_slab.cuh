// Prepared mode: sums of the pairs' outputs, a slab of 256 values of a token at a time.
#pragma once
#include "add_parts.cuh"
#include "fp8_item.cuh"

namespace moe {

// Of part c0 + i of a token, in lane i: where it begins in a slab, in units of 16 bytes of which it has sixteen, with
// the last bits of its slot, which permute them; no part has all bits set. And its weight.
struct Part {
  unsigned place = ~0u;
  float weight = 0.f;
};
__device__ __forceinline__ Part find_part(const Fp8Args& a, int t, int c0) {
  const int c = c0 + (threadIdx.x & 31);
  if (c >= min(c0 + 8, a.top_k * a.splits2)) return {};
  const int pair = t * a.top_k + c / a.splits2, slot = __ldcg(a.pair_slot + pair);
  if (slot < 0) return {};
  return {(unsigned)(c % a.splits2 * 2 * a.tokens * a.top_k + slot) * 16 + (slot & 7), __ldcg(a.topk_weights + pair)};
}

// out[t] = sum of the token's weighted parts, in order, by a warp. `part`: of its first eight. `discard`: the parts
// should not reach memory.
template <bool WIDE>
__device__ __forceinline__ void sum_slab(const Fp8Args& a, int t, int slab, Part part, bool discard) {
  const int lane = threadIdx.x & 31, parts = a.top_k * a.splits2;
  // A lane's eight values are half of a 32-byte unit of one warpgroup's 128, or a 16-byte unit of 128 rows.
  const unsigned half = (unsigned)a.tokens * a.top_k * 16;
  uint4* contrib = static_cast<uint4*>(a.contrib) + (size_t)slab * a.splits2 * 2 * half;
  const uint4* from = contrib + (lane >> 4) * half;
  auto unit = [&](unsigned slot) {
    return WIDE ? wide_unit(lane & 15, slot) : output_unit((lane >> 1) & 7, slot) * 2 + (lane & 1);
  };
  float acc[8] = {};
  for (int c0 = 0; c0 < parts; c0 += 8) {
    if (c0) part = find_part(a, t, c0);
    const unsigned there = __ballot_sync(0xffffffffu, ~part.place);  // of eight experts one rank may hold one
    uint4 raw[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned place = __shfl_sync(0xffffffffu, part.place, i);
      if (there >> i & 1) raw[i] = __ldcg(from + ((place & ~15u) + unit(place)));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float weight = __shfl_sync(0xffffffffu, part.weight, i);
      if (there >> i & 1) add_part(acc, raw[i], weight);
    }
    __syncwarp();  // the parts are read; the next launch writes them before it reads them
    const unsigned place = __shfl_sync(0xffffffffu, part.place, lane >> 2);
    if (discard && ~place) discard_l2(contrib + ((place & ~15u) + ((lane >> 1) & 1) * half + (lane & 1) * 8));
  }
  __nv_bfloat16* row = static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + slab * 256;
  if constexpr (WIDE) {
    reinterpret_cast<uint4*>(row)[lane] = make_uint4(pack_bf16(acc[0], acc[1]), pack_bf16(acc[2], acc[3]),
                                                     pack_bf16(acc[4], acc[5]), pack_bf16(acc[6], acc[7]));
    return;
  }
  // A lane has rows r and r + 8, and those 128 further, of two adjacent r: acc[4 * (r & 1) + 2 * (+128) + (+8)].
  // Neighbouring lanes exchange, so that each stores four rows side by side.
  const bool odd = lane & 1;
  __nv_bfloat16* out = row + (lane >> 2) * 16 + odd * 8 + (lane & 2) * 2;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint32_t low = pack_bf16(acc[2 * m], acc[4 + 2 * m]), high = pack_bf16(acc[2 * m + 1], acc[5 + 2 * m]);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
    *reinterpret_cast<uint2*>(out + m * 128) = odd ? make_uint2(other, high) : make_uint2(low, other);
  }
}

// One warpgroup's half of a tile's slabs, those of an item that ends before `end`, is stored.
__device__ __forceinline__ void announce_slabs(const Fp8Args& a, int end) { add_release(a.count2 + end - 1, 1); }

// Slabwise, four warps of every block: each sums the same tokens' slabs as soon as they are complete.
__device__ __forceinline__ void sum_slabs(const Fp8Args& a, int warp, int tiles) {
  const int want = 2 * tiles * a.splits2;
  for (SlabRange r = next_slabs(a, {0, 0}); r.count > 0; r = next_slabs(a, r)) {
    if (warp == 0)
      while (ld_acquire(reinterpret_cast<const int*>(a.count2 + r.begin + r.count - 1)) != want) __nanosleep(500);
    named_sync(4, 128);
    for (int t = blockIdx.x * 4 + warp; t < a.tokens; t += gridDim.x * 4) {
      const Part first = find_part(a, t, 0);
      for (int i = 0; i < r.count; ++i) sum_slab<false>(a, t, r.begin + i, first, true);
    }
  }
}

}  // namespace moe
