// Weights times tokens over an item's chunks, by warps for few tokens and by warpgroups for many.
#pragma once
#include "w4a16_e4m3.cuh"

namespace w4a16 {

// One step's left operand: the words as they are (bf16), or word k of four of INT4 unpacked.
template <bool BF16>
__device__ __forceinline__ void load_step(uint32_t (&a)[4], const uint4& words, const uint4& scales, int k) {
  if constexpr (BF16) {
    a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
  } else {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w}, pair[4] = {scales.x, scales.y, scales.z, scales.w};
    Int4::Unpack(pair[k >> 1], k & 1)(a, word[k & 3]);
  }
}

// Warps on their own, each with its 16 rows of every tile: the instruction's latency is hidden by the other warps.
template <int NT, bool BF16, class C>
__device__ __forceinline__ void multiply_by_warps(Smem<C>& s, int nk, int& seq, float (&acc)[C::TILES][NT / 2]) {
  const int tid = threadIdx.x - 128, wg = tid >> 7, lane = tid & 31, t = tid & 127;
  constexpr int STEPS = BF16 ? 2 : 8;
  const int token = lane & 7, part = lane >> 3;
  for (int kb = 0; kb < nk; ++kb, ++seq) {
    const int st = seq % C::STAGES, parity = (seq / C::STAGES) & 1;
    mbar_wait(&s.weights_full[st], parity);
    const uint4* w = reinterpret_cast<const uint4*>(s.w[st]) + wg * C::TILES * 256 + t;
    uint4 scale[C::TILES], word[C::TILES][2];
#pragma unroll
    for (int m = 0; m < C::TILES; ++m) {
      scale[m] = BF16 ? make_uint4(0, 0, 0, 0)
                      : reinterpret_cast<const uint4*>(s.scale[st])[(wg * C::TILES + m) * 32 + (t >> 2)];
      word[m][0] = w[m * 256];
      word[m][1] = w[m * 256 + 128];
    }
    mbar_wait(&s.full[st], parity);
    const uint32_t row = smem_u32(s.b[st]) + token * C::PITCH + part * 16;
    uint32_t read = 0;
#pragma unroll
    for (int k = 0; k < STEPS; k += 2) {
      uint32_t b[NT / 8][4];  // two steps
#pragma unroll
      for (int j = 0; j < NT / 8; ++j) {
        ldmatrix_x4(b[j], row + j * 8 * C::PITCH + k * 32);
        if (k == STEPS - 2) read |= b[j][0];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int m = 0; m < C::TILES; ++m) {
          uint32_t a[4];
          load_step<BF16>(a, word[m][BF16 ? i : k >> 2], scale[m], k + i);
#pragma unroll
          for (int j = 0; j < NT / 8; ++j)
            mma_bf16(acc[m] + 4 * j, a[0], a[1], a[2], a[3], b[j][2 * i], b[j][2 * i + 1]);
        }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive_behind(&s.empty[st], read);
  }
}

// Warpgroups: DEPTH - 1 matrix instructions are under way while the next one's weights are unpacked; a stage is handed
// back when the next has begun.
template <int NT, bool BF16, class C>
__device__ __forceinline__ void multiply_by_warpgroups(Smem<C>& s, int nk, int& seq, float (&acc)[C::TILES][NT / 2]) {
  using F = typename C::Format;
  using Group = typename F::Group;
  const int tid = threadIdx.x - 128, wg = tid >> 7, lane = tid & 31, t = tid & 127;
  constexpr int STEPS = BF16 ? 2 : 8, DEPTH = NT > 64 ? 2 : 4;  // no more fits the registers
  uint32_t a[DEPTH][4];
  for (int kb = 0; kb < nk; ++kb, ++seq) {
    const int st = seq % C::STAGES, parity = (seq / C::STAGES) & 1;
    mbar_wait(&s.weights_full[st], parity);
    const unsigned char* w = s.w[st] + wg * C::TILES * 4096 + t * 16;
    const unsigned char* scales = s.scale[st] + wg * C::TILES * kTileScales<F> + (t >> 2) * sizeof(typename F::Row);
    mbar_wait(&s.full[st], parity);
    fence_proxy_async();  // the tokens came by ordinary asynchronous copies
    const uint64_t b = desc_sw128(smem_u32(s.b[st]));
    uint2 word[C::TILES];
    typename F::Unpack unpack[C::TILES];
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int m = 0; m < C::TILES; ++m) {
        const int step = k * C::TILES + m;
        uint32_t (&now)[4] = a[step % DEPTH];
        uint4 bf16;
        if constexpr (BF16) {
          bf16 = *reinterpret_cast<const uint4*>(w + m * 4096 + k * 2048);
        } else if (k % 2 == 0) {
          word[m] = *reinterpret_cast<const uint2*>(w + m * 4096 + (k >> 2) * 2048 + (k & 2) * 4);
        }
        if constexpr (!BF16)
          if (k % (F::GROUP / 16) == 0)
            unpack[m] = typename F::Unpack(
                *reinterpret_cast<const Group*>(scales + m * kTileScales<F> + k * F::GROUPS / 8 * sizeof(Group)),
                k % 2);
        wgmma_wait<DEPTH - 1>();
        if (step == DEPTH - 1 && kb > 0 && lane == 0) mbar_arrive(&s.empty[(seq - 1) % C::STAGES]);
        if constexpr (BF16) now[0] = bf16.x, now[1] = bf16.y, now[2] = bf16.z, now[3] = bf16.w;
        else unpack[m](now, k % 2 ? word[m].y : word[m].x);
        wgmma_fence();
        WgmmaBf16Rs<NT>::go(acc[m], now, b + (k >> 2) * (C::NMAX * 8) + 2 * (k & 3));
        wgmma_commit();
      }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < C::TILES; ++m) fence_regs(acc[m]);
  if (lane == 0) mbar_arrive(&s.empty[(seq - 1) % C::STAGES]);
}

// acc[m] += weights of 64-row tile m x tokens.
template <int NT, bool BF16, class C>
__device__ __forceinline__ void multiply(Smem<C>& s, bool paired, int nk, int& seq, float (&acc)[C::TILES][NT / 2]) {
  if constexpr (C::E4M3) {
    if (NT == 8 && paired) multiply_e4m3<NT, NT == 8, C>(s, nk, seq, acc);
    else multiply_e4m3<NT, false, C>(s, nk, seq, acc);
  } else if constexpr (C::FEW) multiply_by_warps<NT, BF16, C>(s, nk, seq, acc);
  else multiply_by_warpgroups<NT, BF16, C>(s, nk, seq, acc);
}

}  // namespace w4a16
