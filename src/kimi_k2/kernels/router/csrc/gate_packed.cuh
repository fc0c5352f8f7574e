// Four tokens a warp, eight lanes a token: the strategy for many tokens, built for few instructions a token.
//
// Rows come to shared memory by asynchronous copies. Each lane holds EXPERTS / 8 scores in G sets; the KP-th largest of
// a token's 2 * KP set maxima, found by a bitonic network over eight lanes, bounds the KP-th largest score from below.
// The few scores at or above it (about eleven for KP = 8) are listed in shared memory and ranked by counting.
#pragma once
#include <cuda_pipeline.h>

#include "gate_warp.cuh"

namespace gate {

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

template <int EXPERTS>
struct PackedScratch {
  float row[4][EXPERTS];
  float value[4][kCandidates + 4];    // scores of candidates, then -inf; four more keep the tokens in different banks
  int candidate[4][kCandidates + 4];  // their experts
  float logit[4][kMaxTopK];           // by rank
  int expert[4][kMaxTopK];
};

template <int EXPERTS, int WARPS>
struct PackedSmem {
  float bias[EXPERTS];
  PackedScratch<EXPERTS> warp[WARPS];
};

template <int EXPERTS>
__device__ __forceinline__ void copy_group(const GateArgs& a, int group, PackedScratch<EXPERTS>& s, int lane) {
  const int slot = lane >> 3, l = lane & 7, token = min(group * 4 + slot, a.tokens - 1);
  const float* from = a.logits + static_cast<int64_t>(token) * EXPERTS + 4 * l;
#pragma unroll
  for (int c = 0; c < EXPERTS / 32; ++c) __pipeline_memcpy_async(&s.row[slot][32 * c + 4 * l], from + 32 * c, 16);
  __pipeline_commit();
}

// Writes logit and expert of the top_k best of a token's `total` candidates by rank. Its eight lanes count for OWN
// candidates each how many are larger; only if equal scores show (the ranks then add up to less) or the list is longer
// are the experts' numbers compared too. All lanes of the warp call; `longest` is the largest total among them.
template <int OWN>
__device__ __forceinline__ void rank_candidates(const float* value, const int* candidate, const float* row, int total,
                                                int longest, int top_k, int l, float* logit, int* expert) {
  float mine[OWN];
  int rank[OWN] = {};
#pragma unroll
  for (int o = 0; o < OWN; ++o) mine[o] = value[l + 8 * o];
#pragma unroll 2
  for (int j = 0; j < longest; j += 4) {
    const float4 q = *reinterpret_cast<const float4*>(value + j);
#pragma unroll
    for (int o = 0; o < OWN; ++o) rank[o] += (q.x > mine[o]) + (q.y > mine[o]) + (q.z > mine[o]) + (q.w > mine[o]);
  }
  int sum = 0;
#pragma unroll
  for (int o = 0; o < OWN; ++o) sum += l + 8 * o < total ? rank[o] : 0;
#pragma unroll
  for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(kAll, sum, d);
  if (!__any_sync(kAll, 2 * sum != total * (total - 1) || total > 8 * OWN)) {
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
      if (l + 8 * o < total && rank[o] < top_k) {
        const int e = candidate[l + 8 * o];
        logit[rank[o]] = row[e], expert[rank[o]] = e;
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = l; i < total; i += 8) {
    const int e = candidate[i];
    int place = 0;
    for (int j = 0; j < total; ++j) place += before(value[j], candidate[j], value[i], e);
    if (place < top_k) logit[place] = row[e], expert[place] = e;
  }
}

template <int EXPERTS, int KP>
__device__ __forceinline__ void gate_group(const GateArgs& a, const float* bias, int group, int valid_tokens,
                                           PackedScratch<EXPERTS>& s, int lane) {
  constexpr int G = KP / 4, CHUNKS = EXPERTS / 32;
  static_assert(CHUNKS % G == 0, "equal sets");
  const int slot = lane >> 3, l = lane & 7, token = group * 4 + slot;
  const float* row = s.row[slot];
  *reinterpret_cast<float4*>(&s.value[slot][4 * l]) =
      make_float4(-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F);
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
  const int longest = __reduce_max_sync(kAll, listed ? total : 0);
  __syncwarp();
  if (listed) {
    int at = end - count;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      while (mask[h]) {
        const int i = h * 2 * CHUNKS + __ffs(mask[h]) - 1, e = (i & ~3) * 8 + 4 * l + (i & 3);
        mask[h] &= mask[h] - 1;
        s.value[slot][at] = choice_score(row[e], bias[e]), s.candidate[slot][at] = e;
        ++at;
      }
    }
  }
  __syncwarp();
  rank_candidates<KP / 4>(s.value[slot], s.candidate[slot], row, listed ? total : 0, longest, a.top_k, l, s.logit[slot],
                          s.expert[slot]);
  const bool valid = token < valid_tokens;
  unsigned unlisted = __ballot_sync(kAll, valid && !listed) & 0x01010101u;
  while (unlisted) {  // the whole warp for one token
    const int other = (__ffs(unlisted) - 1) / 8;
    unlisted &= unlisted - 1;
    float z[EXPERTS / 32], b[EXPERTS / 32], w[EXPERTS / 32];
#pragma unroll
    for (int i = 0; i < EXPERTS / 32; ++i) {
      const int e = (i / 4) * 128 + lane * 4 + i % 4;
      z[i] = s.row[other][e], b[i] = bias[e], w[i] = choice_score(z[i], b[i]);
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

template <int EXPERTS, int KP, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 1) gate_packed_kernel(GateArgs a) {
  extern __shared__ __align__(16) unsigned char raw[];
  auto& smem = *reinterpret_cast<PackedSmem<EXPERTS, WARPS>*>(raw);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto& scratch = smem.warp[warp];
  cudaTriggerProgrammaticLaunchCompletion();
  for (int e = threadIdx.x; e < EXPERTS; e += WARPS * 32) smem.bias[e] = a.bias[e];
  __syncthreads();
  cudaGridDependencySynchronize();
  const int groups = (a.tokens + 3) / 4, step = gridDim.x * WARPS;
  const int valid_tokens = a.num_valid == nullptr ? a.tokens : min(a.tokens, *a.num_valid);
  int group = warp * gridDim.x + blockIdx.x;  // neighbouring groups go to different SMs
  for (; group < groups; group += step) {     // while this warp waits for its rows, others work
    copy_group(a, group, scratch, lane);
    __pipeline_wait_prior(0);
    __syncwarp();
    gate_group<EXPERTS, KP>(a, smem.bias, group, valid_tokens, scratch, lane);
    __syncwarp();
  }
}

}  // namespace gate
