// Four tokens a warp, eight lanes a token: the strategy for many tokens, built for few instructions a token.
//
// Rows stream through shared memory by asynchronous copies, one group of four ahead. Each lane holds EXPERTS / 8
// scores in G sets; the KP-th largest of a token's 2 * KP set maxima, found by a bitonic network over eight lanes,
// bounds the KP-th largest score from below. The few scores at or above it (about eleven for KP = 8) are listed in
// shared memory and ranked by counting.
#pragma once
#include <cuda_pipeline.h>

#include "gate_warp.cuh"

namespace gate {

constexpr int kPackedWarps = 16;

// (4 * G)-th largest of the 8 * G values that the eight lanes of a token hold.
template <int G>
__device__ __forceinline__ float upper_half_minimum(float (&m)[G], int l) {
#pragma unroll
  for (int size = 2; size <= 4 * G; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      if (stride >= G) {
        // Ascending blocks keep the smaller value at the lower position, descending ones the larger.
        const bool smaller = ((l * G & size) == 0) == ((l * G & stride) == 0);
#pragma unroll
        for (int g = 0; g < G; ++g) {
          const float o = __shfl_xor_sync(kAll, m[g], stride / G);
          m[g] = smaller ? fminf(m[g], o) : fmaxf(m[g], o);
        }
      } else {
#pragma unroll
        for (int g = 0; g < G; ++g) {
          if (g & stride) continue;
          const bool ascending = size < G ? (g & size) == 0 : (l * G & size) == 0;
          const float low = fminf(m[g], m[g + stride]), high = fmaxf(m[g], m[g + stride]);
          m[g] = ascending ? low : high, m[g + stride] = ascending ? high : low;
        }
      }
    }
  }
  float least = CUDART_INF_F;
#pragma unroll
  for (int g = 0; g < G; ++g) least = fminf(least, fmaxf(m[g], __shfl_xor_sync(kAll, m[g], 4)));
  least = fminf(least, __shfl_xor_sync(kAll, least, 1));
  return fminf(least, __shfl_xor_sync(kAll, least, 2));
}

template <int EXPERTS, int KP>
struct PackedScratch {
  float row[2][4][EXPERTS];
  float2 candidate[4][kCandidates + 1];  // score, expert; one more keeps the four tokens in different banks
  float logit[4][kMaxTopK];
  int expert[4][kMaxTopK];
};

template <int EXPERTS, int KP>
struct PackedSmem {
  float bias[EXPERTS];
  PackedScratch<EXPERTS, KP> warp[kPackedWarps];
};

template <int EXPERTS, int KP>
__device__ __forceinline__ void copy_group(const GateArgs& a, int group, PackedScratch<EXPERTS, KP>& s, int stage,
                                           int lane) {
  const int slot = lane >> 3, l = lane & 7, token = min(group * 4 + slot, a.tokens - 1);
  const float* from = a.logits + static_cast<int64_t>(token) * EXPERTS + 4 * l;
#pragma unroll
  for (int c = 0; c < EXPERTS / 32; ++c) __pipeline_memcpy_async(&s.row[stage][slot][32 * c + 4 * l], from + 32 * c, 16);
  __pipeline_commit();
}

template <int EXPERTS, int KP>
__device__ __forceinline__ void gate_group(const GateArgs& a, const float* bias, int group, int valid_tokens,
                                           PackedScratch<EXPERTS, KP>& s, int stage, int lane) {
  constexpr int G = KP / 4, CHUNKS = EXPERTS / 32;
  static_assert(CHUNKS % G == 0, "equal sets");
  const int slot = lane >> 3, l = lane & 7, token = group * 4 + slot;
  const float* row = s.row[stage][slot];
  float v[4 * CHUNKS], m[G];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    m[g] = -CUDART_INF_F;
#pragma unroll
    for (int c = g * (CHUNKS / G); c < (g + 1) * (CHUNKS / G); ++c) {
      const float4 z = *reinterpret_cast<const float4*>(row + 32 * c + 4 * l);
      const float4 b = *reinterpret_cast<const float4*>(bias + 32 * c + 4 * l);
      v[4 * c] = choice_score(z.x, b.x), v[4 * c + 1] = choice_score(z.y, b.y);
      v[4 * c + 2] = choice_score(z.z, b.z), v[4 * c + 3] = choice_score(z.w, b.w);
      m[g] = fmaxf(m[g], fmaxf(fmaxf(v[4 * c], v[4 * c + 1]), fmaxf(v[4 * c + 2], v[4 * c + 3])));
    }
  }
  const float threshold = upper_half_minimum<G>(m, l);
  unsigned mask[2] = {0, 0};  // bit 4 * c + j of the concatenation of two half masks
#pragma unroll
  for (int i = 0; i < 4 * CHUNKS; ++i)
    if (v[i] >= threshold) mask[i / (2 * CHUNKS)] |= 1u << (i % (2 * CHUNKS));
  const int count = __popc(mask[0]) + __popc(mask[1]);
  int end = count;
#pragma unroll
  for (int d = 1; d < 8; d *= 2) {
    const int o = __shfl_up_sync(kAll, end, d, 8);
    if (l >= d) end += o;
  }
  const int total = __shfl_sync(kAll, end, 7, 8);
  const bool listed = total >= a.top_k && total <= kCandidates;
  int longest = __reduce_max_sync(kAll, listed ? total : 0);
  if (listed) {
    int at = end - count;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      while (mask[h]) {
        const int i = h * 2 * CHUNKS + __ffs(mask[h]) - 1, e = (i & ~3) * 8 + 4 * l + (i & 3);
        mask[h] &= mask[h] - 1;
        s.candidate[slot][at++] = make_float2(choice_score(row[e], bias[e]), __int_as_float(e));
      }
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int base = 0; base < longest; base += 16) {
    const float2 p = s.candidate[slot][base + l], q = s.candidate[slot][base + l + 8];
    const int expert_p = __float_as_int(p.y), expert_q = __float_as_int(q.y);
    int rank_p = 0, rank_q = 0;
#pragma unroll 4
    for (int j = 0; j < longest; ++j) {
      const float2 o = s.candidate[slot][j];
      const bool exists = j < total;
      rank_p += exists && before(o.x, __float_as_int(o.y), p.x, expert_p);
      rank_q += exists && before(o.x, __float_as_int(o.y), q.x, expert_q);
    }
    if (listed && base + l < total && rank_p < a.top_k)
      s.logit[slot][rank_p] = row[expert_p], s.expert[slot][rank_p] = expert_p;
    if (listed && base + l + 8 < total && rank_q < a.top_k)
      s.logit[slot][rank_q] = row[expert_q], s.expert[slot][rank_q] = expert_q;
  }
  const bool valid = token < valid_tokens;
  unsigned unlisted = __ballot_sync(kAll, valid && !listed) & 0x01010101u;
  while (unlisted) {  // the whole warp for one token
    const int other = (__ffs(unlisted) - 1) / 8;
    unlisted &= unlisted - 1;
    float z[EXPERTS / 32], b[EXPERTS / 32], w[EXPERTS / 32];
#pragma unroll
    for (int i = 0; i < EXPERTS / 32; ++i) {
      const int e = (i / 4) * 128 + lane * 4 + i % 4;
      z[i] = s.row[stage][other][e], b[i] = bias[e], w[i] = choice_score(z[i], b[i]);
    }
    select_by_rounds<EXPERTS / 32>(z, w, EXPERTS, a.top_k, lane, s.logit[other], s.expert[other]);
  }
  __syncwarp();
  // Lane l has ranks l and, for KP = 16, l + 8; the sums are those of tree_sum8.
  float score[KP / 8], sum = 0.0f;
#pragma unroll
  for (int h = 0; h < KP / 8; ++h) {
    score[h] = l + 8 * h < a.top_k ? weight_score(s.logit[slot][l + 8 * h]) : 0.0f;
    float part = score[h];
#pragma unroll
    for (int d = 1; d < 8; d *= 2) part += __shfl_xor_sync(kAll, part, d);
    sum = h ? sum + part : part;
  }
#pragma unroll
  for (int h = 0; h < KP / 8; ++h) {
    const int rank = l + 8 * h;
    if (token < a.tokens && rank < a.top_k)
      store_choice(a, token, rank, valid ? s.expert[slot][rank] : 0, valid ? routing_weight(a, score[h], sum) : 0.0f);
  }
}

template <int EXPERTS, int KP>
__global__ void __launch_bounds__(kPackedWarps * 32) gate_packed_kernel(GateArgs a) {
  extern __shared__ __align__(16) unsigned char raw[];
  auto& smem = *reinterpret_cast<PackedSmem<EXPERTS, KP>*>(raw);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto& scratch = smem.warp[warp];
  cudaTriggerProgrammaticLaunchCompletion();
  for (int e = threadIdx.x; e < EXPERTS; e += kPackedWarps * 32) smem.bias[e] = a.bias[e];
  __syncthreads();
  cudaGridDependencySynchronize();
  const int groups = (a.tokens + 3) / 4, step = gridDim.x * kPackedWarps;
  const int valid_tokens = a.num_valid == nullptr ? a.tokens : min(a.tokens, *a.num_valid);
  int group = warp * gridDim.x + blockIdx.x;  // neighbouring groups go to different multiprocessors
  if (group >= groups) return;
  copy_group(a, group, scratch, 0, lane);
  for (int stage = 0; group < groups; group += step, stage ^= 1) {
    if (group + step < groups) {
      copy_group(a, group + step, scratch, stage ^ 1, lane);
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
    __syncwarp();
    gate_group<EXPERTS, KP>(a, smem.bias, group, valid_tokens, scratch, stage, lane);
    __syncwarp();
  }
}

}  // namespace gate
