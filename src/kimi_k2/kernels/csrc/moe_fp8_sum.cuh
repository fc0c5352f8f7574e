// Sums of the blockwise FP8 expert kernel: the pairs' outputs of a token, in the order of its experts.
#pragma once
#include "moe_fp8_item.cuh"

namespace moe {

// Fused mode, one warp per slot of the event ring: a token's slab is summed by whoever completes its last part.
template <class S>
__device__ __forceinline__ void sum_completed(const Fp8Args& a, S& s, int slot) {
  const int lane = threadIdx.x & 31, slabs = a.hidden / 256;
  for (int round = 0;; ++round) {
    mbar_wait(&s.epi_full[slot], round & 1);
    const int tile_id = s.epi_tile[slot], slab = s.epi_slab[slot];
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.epi_empty[slot]);
    if (tile_id < 0) break;
    fence_gpu();
    bool last = false;
    int token = 0;
    if (lane < s.route.tile_n[tile_id]) {
      token = s.route.slot_pair[s.route.tile_start[tile_id] + lane] / a.top_k;
      const unsigned want = s.route.token_pairs[token] * a.splits2 - 1;
      last = atomicInc(a.count2 + token * slabs + slab, want) == want;
    }
    unsigned todo = __ballot_sync(0xffffffffu, last);
    if (todo) fence_gpu();
    while (todo) {
      const int t = __shfl_sync(0xffffffffu, token, __ffs(todo) - 1);
      todo &= todo - 1;
      const float* p = static_cast<const float*>(a.contrib) + (size_t)t * a.top_k * a.splits2 * a.hidden + slab * 256;
      float4 u = make_float4(0.f, 0.f, 0.f, 0.f), v = u;
      const int parts = a.top_k * a.splits2;
#pragma unroll 8
      for (int c = 0; c < parts; ++c)
        if (s.route.pair_valid[t * a.top_k + c / a.splits2]) {
          const float4 x = __ldcg(reinterpret_cast<const float4*>(p + (size_t)c * a.hidden) + lane);
          const float4 y = __ldcg(reinterpret_cast<const float4*>(p + (size_t)c * a.hidden) + 32 + lane);
          u.x += x.x; u.y += x.y; u.z += x.z; u.w += x.w;
          v.x += y.x; v.y += y.y; v.z += y.z; v.w += y.w;
        }
      uint2* o = reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + slab * 256);
      o[lane] = make_uint2(pack_bf16(u.x, u.y), pack_bf16(u.z, u.w));
      o[32 + lane] = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    }
  }
}

// Prepared mode, last launch: out[t] = sum of the token's weighted parts, in order; a warp sums one slab of one token.
// The slabs written last come first: they may still be in the L2.
__global__ void __launch_bounds__(256) combine_kernel(const __grid_constant__ Fp8Args a) {
  const int lane = threadIdx.x & 31, slabs = a.hidden / 256, parts = a.top_k * a.splits2;
  const int t = blockIdx.x * 8 + (threadIdx.x >> 5), slab = slabs - 1 - blockIdx.y;
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (t >= a.tokens) return;
  const __nv_bfloat16* from =
      static_cast<const __nv_bfloat16*>(a.contrib) + (size_t)slab * a.tokens * parts * 256 + lane * 8;
  float acc[8] = {};
  for (int c0 = 0; c0 < parts; c0 += 8) {
    // Lane i looks up part c0 + i.
    int row = -1;
    float weight = 0.f;
    if (lane < 8 && c0 + lane < parts) {
      const int pair = t * a.top_k + (c0 + lane) / a.splits2, slot = __ldg(a.pair_slot + pair);
      weight = __ldg(a.topk_weights + pair);
      if (slot >= 0) row = slot * a.splits2 + (c0 + lane) % a.splits2;
    }
    uint4 raw[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = __shfl_sync(0xffffffffu, row, i);
      raw[i] = r >= 0 ? __ldcg(reinterpret_cast<const uint4*>(from + (size_t)r * 256)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float w = __shfl_sync(0xffffffffu, row >= 0 ? weight : 0.f, i);
      const uint32_t v[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v[k]));
        acc[2 * k] += u.x * w;
        acc[2 * k + 1] += u.y * w;
      }
    }
  }
  // A lane has rows r and r + 8, and those 128 further, of two adjacent r: acc[4 * (r & 1) + 2 * (+128) + (+8)].
  // Neighbouring lanes exchange, so that each stores four rows side by side.
  const bool odd = lane & 1;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + slab * 256 + (lane >> 2) * 16 +
                       odd * 8 + (lane & 2) * 2;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint32_t low = pack_bf16(acc[2 * m], acc[4 + 2 * m]), high = pack_bf16(acc[2 * m + 1], acc[5 + 2 * m]);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
    *reinterpret_cast<uint2*>(out + m * 128) = odd ? make_uint2(other, high) : make_uint2(low, other);
  }
}

}  // namespace moe
