// Work items of the blockwise FP8 expert kernel: which weights an item covers, its tile of tokens, e4m3 groups.
#pragma once
#include "common/csrc/quantize.cuh"
#include "fp8.cuh"

namespace moe {

// Slabwise, every tile's part of some slabs comes before the next slabs, so that slabs are complete, and can be summed,
// one after the other: item_slabs at a time, and half of what is left at the end. Otherwise a tile's slabs follow each
// other.
struct SlabRange {
  int begin, count;
};
__device__ __forceinline__ SlabRange next_slabs(const Fp8Args& a, SlabRange r) {
  const int begin = r.begin + r.count;
  return {begin, min(a.item_slabs, (a.hidden / 256 - begin + 1) / 2)};
}

// Second-stage items of a tile and split.
__device__ __forceinline__ int slab_items(const Fp8Args& a, bool slabwise) {
  if (!slabwise) return a.hidden / 256 / a.item_slabs;
  int items = 0;
  for (SlabRange r = next_slabs(a, {0, 0}); r.count > 0; r = next_slabs(a, r)) ++items;
  return items;
}

__device__ __forceinline__ Item decode_item(const Fp8Args& a, int item, int tiles, bool slabwise = false) {
  const int groups = a.inter / 128, slabs = a.hidden / 256;
  const int first = tiles * groups * a.splits1;
  Item r;
  if (item < first) {
    r.stage = 0;
    r.slabs = 1;
    r.split = item % a.splits1;
    const int t = item / a.splits1;
    r.group = t % groups;
    r.tile = t / groups;
    const int kb = a.hidden / 128;
    r.kb0 = r.split * kb / a.splits1;
    r.kb1 = (r.split + 1) * kb / a.splits1;
  } else {
    item -= first;
    r.stage = 1;
    r.split = item % a.splits2;
    const int t = item / a.splits2;
    if (slabwise) {
      SlabRange range = next_slabs(a, {0, 0});
      for (int i = t / tiles; i > 0; --i) range = next_slabs(a, range);
      r.slabs = range.count;
      r.group = range.begin;
      r.tile = t % tiles;
    } else {
      const int per_tile = slabs / a.item_slabs;
      r.slabs = a.item_slabs;
      r.group = t % per_tile * a.item_slabs;
      r.tile = t / per_tile;
    }
    r.kb0 = r.split * groups / a.splits2;
    r.kb1 = (r.split + 1) * groups / a.splits2;
  }
  return r;
}

// {expert, first slot, tokens, what the prepared mode adds}
template <bool FUSED, class S>
__device__ __forceinline__ int4 load_tile(const Fp8Args& a, const S& s, int tile) {
  if constexpr (FUSED) return make_int4(s.route.tile_expert[tile], s.route.tile_start[tile], s.route.tile_n[tile], 0);
  else return load_written(a.tiles + tile);
}

// Until every 128-column group of the tile's intermediate is written. All lanes of a warp.
__device__ __forceinline__ void wait_for_tile(const Fp8Args& a, int tile, int epoch, int lane) {
  const int groups = a.inter / 128;
  bool ready;
  do {
    ready = true;
    for (int f = lane; f < groups; f += 32) ready &= ld_acquire(a.flags + tile * groups + f) == epoch;
  } while (!__all_sync(0xffffffffu, ready));
}

// Prepared mode: where the 32-byte unit `unit` of a slot's 128 outputs lies among its eight.
__device__ __forceinline__ int output_unit(int unit, int slot) { return unit ^ ((slot >> 1) & 3); }
// The same of 16-byte units where tiles have kWideTokens.
__device__ __forceinline__ int wide_unit(int unit, int slot) { return unit ^ (slot & 7); }

// One 128-value group of a bf16 row by one warp: lane holds 4 values.
__device__ __forceinline__ uint32_t quantize_lane(uint2 raw, float& scale) {
  const float2 u = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&raw.x));
  const float2 v = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&raw.y));
  float m = fmaxf(fmaxf(fabsf(u.x), fabsf(u.y)), fmaxf(fabsf(v.x), fabsf(v.y)));
#pragma unroll
  for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
  scale = group_scale(m);
  const float inv = 1.f / scale;
  return pack_e4m3(u.x * inv, u.y * inv, v.x * inv, v.y * inv);
}

}  // namespace moe
