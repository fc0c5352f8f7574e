// Fused mode of the expert kernels, FP8 and INT4: the warps that sum finished tokens.
#pragma once
#include "fp8_item.cuh"

namespace moe {

// A token's slab is summed, pairs in order, by whoever completes its last part. Where tokens share their experts one
// tile completes many at once: the warps share them out. `weights` by pair, of parts that have not been weighed; or
// null.
template <class S>
__device__ __forceinline__ void sum_completed(const Fp8Args& a, S& s, int me, const float* weights = nullptr) {
  const int lane = threadIdx.x & 31, slabs = a.hidden / 256;
  for (int event = 0;; ++event) {
    const int slot = event % kRing;
    mbar_wait(&s.epi_full[slot], (event / kRing) & 1);
    const int tile_id = s.epi_tile[slot], slab = s.epi_slab[slot];
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.epi_empty[slot]);
    if (tile_id < 0) break;
    bool last = false;
    int token = 0;
    if (lane < s.route.tile_n[tile_id] && (lane + event) % kSumWarps == me) {
      token = s.route.slot_pair[s.route.tile_start[tile_id] + lane] / a.top_k;
      const unsigned want = s.route.token_pairs[token] * a.splits2 - 1;
      last = inc_acq_rel(a.count2 + token * slabs + slab, want) == want;
    }
    unsigned todo = __ballot_sync(0xffffffffu, last);
    __syncwarp();  // what the counting lanes have acquired is the whole warp's
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
          const float w = weights ? __ldcg(weights + t * a.top_k + c / a.splits2) : 1.f;
          u.x = fmaf(x.x, w, u.x);
          u.y = fmaf(x.y, w, u.y);
          u.z = fmaf(x.z, w, u.z);
          u.w = fmaf(x.w, w, u.w);
          v.x = fmaf(y.x, w, v.x);
          v.y = fmaf(y.y, w, v.y);
          v.z = fmaf(y.z, w, v.z);
          v.w = fmaf(y.w, w, v.w);
        }
      uint2* o = reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)t * a.hidden + slab * 256);
      o[lane] = make_uint2(pack_bf16(u.x, u.y), pack_bf16(u.z, u.w));
      o[32 + lane] = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
      __syncwarp();
      // The next launch writes the parts before it reads them: memory need not get them.
      for (int c = lane >> 3; c < parts; c += 4)
        if (s.route.pair_valid[t * a.top_k + c / a.splits2])
          discard_l2(const_cast<float*>(p) + (size_t)c * a.hidden + (lane & 7) * 32);
    }
  }
}

}  // namespace moe
