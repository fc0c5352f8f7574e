// One work item in two warpgroups: MMAs on the tensor cores, promoted block by block, then stored.
#pragma once
#include "fp8_store.cuh"

namespace moe {

template <int NT, int NMAX, int STAGES, bool FUSED>
__device__ __forceinline__ void process_item(const Fp8Args& a, Fp8Smem<NMAX, STAGES, FUSED>& s, const Item it,
                                             int4 tile, int& seq, int& events) {
  constexpr int R = NT / 2;
  const int tid = threadIdx.x - 128, wg = tid >> 7, lane = tid & 31, q = lane & 3;
  const int n = tile.z, groups = a.inter / 128;
  const int nk = it.kb1 - it.kb0;

  // Fused mode: weight scales of this item, lane l keeps blocks l and 32 + l of both 128-row halves.
  [[maybe_unused]] float ws[2][2];
  if constexpr (FUSED) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float* p = it.stage == 0
                           ? a.s13 + ((size_t)tile.x * 2 * groups + m * groups + it.group) * (a.hidden / 128) + it.kb0
                           : a.s2 + ((size_t)tile.x * (a.hidden / 128) + it.group * 2 + m) * groups + it.kb0;
      ws[m][0] = lane < nk ? __ldg(p + lane) : 0.f;
      ws[m][1] = lane + 32 < nk ? __ldg(p + lane + 32) : 0.f;
    }
  } else if (a.top_k * a.splits2 == 1 && it.stage == 1 && tid < n) {
    const int pair = load_written(a.sorted_pair + tile.y + tid);
    s.meta_pair[tid] = pair;
    s.meta_w[tid] = load_written(a.topk_weights + pair);
  }

  float acc[2][R];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < R; ++i) acc[m][i] = 0.f;

  for (int kb = 0; kb < nk; ++kb, ++seq) {
    const int st = seq % STAGES;
    if constexpr (FUSED) mbar_wait(&s.weights_full[st], (seq / STAGES) & 1);
    mbar_wait(&s.full[st], (seq / STAGES) & 1);
    const uint64_t da = desc_sw128(smem_u32(s.w[st]) + wg * 8192), db = desc_sw128(smem_u32(s.b[st]));
    float w0, w1;
    if constexpr (FUSED) {
      w0 = __shfl_sync(0xffffffffu, kb < 32 ? ws[0][0] : ws[0][1], kb & 31);
      w1 = __shfl_sync(0xffffffffu, kb < 32 ? ws[1][0] : ws[1][1], kb & 31);
    } else {
      fence_proxy_async();  // the tokens came by ordinary copies, and the tensor cores read them
      const float2 w = *reinterpret_cast<const float2*>(s.sw[st]);
      w0 = w.x;
      w1 = w.y;
    }
    const float* sb = s.sb[st];
    float t0[R], t1[R];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) WgmmaE4m3<NT>::go(t0, da + 2 * k, db + 2 * k, k > 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) WgmmaE4m3<NT>::go(t1, da + (kTileBytes >> 4) + 2 * k, db + 2 * k, k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    fence_regs(t0);
    fence_regs(t1);
#pragma unroll
    for (int j = 0; j < NT / 8; ++j) {
      const float2 c = *reinterpret_cast<const float2*>(sb + 8 * j + 2 * q);
      const float c0 = c.x * w0, c1 = c.y * w0, d0 = c.x * w1, d1 = c.y * w1;
      acc[0][4 * j] += t0[4 * j] * c0;
      acc[0][4 * j + 1] += t0[4 * j + 1] * c1;
      acc[0][4 * j + 2] += t0[4 * j + 2] * c0;
      acc[0][4 * j + 3] += t0[4 * j + 3] * c1;
      acc[1][4 * j] += t1[4 * j] * d0;
      acc[1][4 * j + 1] += t1[4 * j + 1] * d1;
      acc[1][4 * j + 2] += t1[4 * j + 2] * d0;
      acc[1][4 * j + 3] += t1[4 * j + 3] * d1;
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(&s.empty[st]);
  }

  if (it.stage == 0) store_intermediate<NT>(a, s, it, tile, acc);
  else store_outputs<NT>(a, s, it, tile, acc, events);
}

}  // namespace moe
