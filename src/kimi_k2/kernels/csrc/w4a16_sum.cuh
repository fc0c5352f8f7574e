// Fused mode: the warps that sum finished tokens.
#pragma once
#include "w4a16.cuh"

namespace w4a16 {

// One of kRing warps, each with its slot of the event ring. Whoever completes the last part of a token's 256 columns
// sums them, pairs in order.
template <class C>
__device__ __forceinline__ void sum_tokens(const Args& a, Smem<C>& s, int slot, int lane) {
  const int slabs = a.hidden / 256, parts = a.top_k * a.splits2;
  for (int round = 0;; ++round) {
    moe::mbar_wait(&s.epi_full[slot], round & 1);
    const int tile = s.epi_tile[slot], slab = s.epi_slab[slot];
    __syncwarp();
    if (lane == 0) moe::mbar_arrive(&s.epi_empty[slot]);
    if (tile < 0) break;
    moe::fence_gpu();
    bool last = false;
    int token = 0;
    if (lane < s.route.tile_n[tile]) {
      token = s.route.slot_pair[s.route.tile_start[tile] + lane] / a.top_k;
      const unsigned want = s.route.token_pairs[token] * a.splits2 - 1;
      last = atomicInc(a.count2 + token * slabs + slab, want) == want;
    }
    unsigned todo = __ballot_sync(0xffffffffu, last);
    if (todo) moe::fence_gpu();
    for (; todo; todo &= todo - 1) {
      const int t = __shfl_sync(0xffffffffu, token, __ffs(todo) - 1);
      const float* p = static_cast<const float*>(a.contrib) + (size_t)t * parts * a.hidden + slab * 256 + lane * 8;
      float sum[8] = {};
#pragma unroll 8
      for (int c = 0; c < parts; ++c)
        if (s.route.pair_valid[t * a.top_k + c / a.splits2]) {
          const float4 x = __ldcg(reinterpret_cast<const float4*>(p + (size_t)c * a.hidden));
          const float4 y = __ldcg(reinterpret_cast<const float4*>(p + (size_t)c * a.hidden) + 1);
          sum[0] += x.x; sum[1] += x.y; sum[2] += x.z; sum[3] += x.w;
          sum[4] += y.x; sum[5] += y.y; sum[6] += y.z; sum[7] += y.w;
        }
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + slab * 256 + lane * 8;
      *reinterpret_cast<uint4*>(out) = make_uint4(moe::pack_bf16(sum[0], sum[1]), moe::pack_bf16(sum[2], sum[3]),
                                                  moe::pack_bf16(sum[4], sum[5]), moe::pack_bf16(sum[6], sum[7]));
    }
  }
}

}  // namespace w4a16
