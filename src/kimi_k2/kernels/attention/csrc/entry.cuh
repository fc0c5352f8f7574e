// What a new token leaves and takes at decode besides GEMMs: its cache entry, and the rotation of its query.
#pragma once
#include "rowwise/csrc/norm.cuh"

namespace decode {

constexpr int kNope = 128, kRope = 64, kHead = kNope + kRope, kRank = 512, kEntry = kRank + kRope;

// Of launches that make queries and entries. Plain C layout: the Python side fills the same structure through ctypes.
struct EntryArguments {
  const __nv_bfloat16* kv_norm;  // [512]
  const __nv_bfloat16* cos;      // [tokens, 32]
  const __nv_bfloat16* sin;
  const int64_t* slots;       // [tokens], to write; outside the cache: nothing is written
  const __nv_bfloat16* w_uk;  // [heads, 128, 512]
  __nv_bfloat16* cache;       // [capacity, 576] of all tokens
  __nv_bfloat16* out;         // [tokens, heads, 576]
  int tokens, heads, capacity;
  int kv_stride;  // values from one token's latent to the next one's
  float kv_eps;
};

__device__ __forceinline__ float widened(const __nv_bfloat16* at) { return __bfloat162float(__ldcg(at)); }

// A pair of values rotated by the token's position.
__device__ __forceinline__ __nv_bfloat162 rotated(const EntryArguments& a, int token, int pair, float even, float odd) {
  const float c = widened(a.cos + token * (kRope / 2) + pair), s = widened(a.sin + token * (kRope / 2) + pair);
  return __floats2bfloat162_rn(even * c - odd * s, odd * c + even * s);
}

// The first warp stores the normed latent, the second one the rotated key, of `latent`: both before that.
__device__ __forceinline__ void store_entry(const EntryArguments& a, int token, const __nv_bfloat16* latent) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t slot = a.slots[token];
  if (warp > 1 || slot < 0 || slot >= a.capacity) return;
  __nv_bfloat16* entry = a.cache + slot * kEntry;
  if (warp == 1) {
    const __nv_bfloat16* key = latent + kRank + 2 * lane;
    reinterpret_cast<__nv_bfloat162*>(entry + kRank)[lane] = rotated(a, token, lane, widened(key), widened(key + 1));
    return;
  }
  uint4 value[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) value[i] = __ldcg(reinterpret_cast<const uint4*>(latent) + i * 32 + lane);
  const float inverse = rsqrtf(sum_lanes(squares8(value[0]) + squares8(value[1])) / kRank + a.kv_eps);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    reinterpret_cast<uint4*>(entry)[i * 32 + lane] =
        normed8(value[i], inverse, __ldg(reinterpret_cast<const uint4*>(a.kv_norm) + i * 32 + lane));
}

}  // namespace decode
