// One warp a token: the strategy for few tokens, built for a short chain of dependent steps.
//
// Each lane holds 4 to 16 scores. The k-th largest of the 32 lane maxima bounds the k-th largest score from below, so
// the chosen are among the scores at or above it: about nine for k = 8. These few are ranked by counting.
#pragma once
#include "gate.cuh"

namespace gate {

constexpr int kCandidates = 32;

struct WarpScratch {
  float maxima[32];
  float4 candidate[kCandidates];  // score, logit, expert
  float score[kMaxTopK];          // sigmoid by rank, zero from top_k on
  int expert[kMaxTopK];
};

// Lane `lane` of chunk c holds experts c * 128 + 4 * lane and the next three; beyond `experts` the value is NaN.
template <int VALUES>
__device__ __forceinline__ void load_row(const float* row, int experts, int lane, float (&value)[VALUES]) {
#pragma unroll
  for (int c = 0; c < VALUES / 4; ++c) {
    const int e = c * 128 + lane * 4;
    float4 q = make_float4(CUDART_NAN_F, CUDART_NAN_F, CUDART_NAN_F, CUDART_NAN_F);
    if (e < experts) q = __ldcg(reinterpret_cast<const float4*>(row + e));
    value[4 * c] = q.x, value[4 * c + 1] = q.y, value[4 * c + 2] = q.z, value[4 * c + 3] = q.w;
  }
}

// Exact selection for rows that the threshold cannot thin out (many equal scores, NaN): k rounds of a warp maximum.
// NaN comes after every number, and has the logit -inf, hence weight zero.
template <int VALUES>
__device__ __forceinline__ void select_by_rounds(const float (&z)[VALUES], const float (&v)[VALUES], int experts,
                                                 int top_k, int lane, float* logit_by_rank, int* expert_by_rank) {
  unsigned taken = 0;
#pragma unroll 1
  for (int rank = 0; rank < top_k; ++rank) {
    uint32_t best = 0;
    int mine = 1 << 30, slot = 0;
    float logit = -CUDART_INF_F;
#pragma unroll
    for (int i = VALUES - 1; i >= 0; --i) {
      const int e = (i / 4) * 128 + lane * 4 + i % 4;
      const uint32_t key = sortable_nan(v[i]);
      if (!(taken >> i & 1) && e < experts && (key >= best)) {
        best = key, mine = e, slot = i;
        logit = key ? z[i] : -CUDART_INF_F;
      }
    }
    const uint32_t top = __reduce_max_sync(kAll, best);
    const int expert = __reduce_min_sync(kAll, best == top ? mine : 1 << 30);
    if (expert == mine) {
      taken |= 1u << slot;
      logit_by_rank[rank] = logit, expert_by_rank[rank] = expert;
    }
  }
}

// Gate of one token by one warp; all lanes call.
template <int VALUES>
__device__ __forceinline__ void gate_token(const GateArgs& a, const float (&z)[VALUES], const float (&bias)[VALUES],
                                           int token, WarpScratch& scratch, int lane) {
  float v[VALUES], m = -CUDART_INF_F;
#pragma unroll
  for (int i = 0; i < VALUES; ++i) v[i] = choice_score(z[i], bias[i]);
#pragma unroll
  for (int i = 0; i < VALUES; i += 4) m = fmaxf(m, fmaxf(fmaxf(v[i], v[i + 1]), fmaxf(v[i + 2], v[i + 3])));
  scratch.maxima[lane] = m;
  if (lane < kMaxTopK) scratch.score[lane] = 0.0f;
  __syncwarp();
  int above = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 o = reinterpret_cast<const float4*>(scratch.maxima)[j];
    above += (o.x > m) + (o.y > m) + (o.z > m) + (o.w > m);
  }
  const float threshold = unsortable(__reduce_min_sync(kAll, above < a.top_k ? sortable(m) : kAll));

  int count = 0;
#pragma unroll
  for (int i = 0; i < VALUES; ++i) count += v[i] >= threshold;
  int at = 0, total = 0;
#pragma unroll
  for (int b = 0; (1 << b) <= VALUES; ++b) {
    const unsigned ballot = __ballot_sync(kAll, count >> b & 1);
    at += __popc(ballot & ((1u << lane) - 1)) << b;
    total += __popc(ballot) << b;
  }
  if (total >= a.top_k && total <= kCandidates) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int e = (i / 4) * 128 + lane * 4 + i % 4;
      if (v[i] >= threshold) scratch.candidate[at++] = make_float4(v[i], z[i], __int_as_float(e), 0.0f);
    }
    __syncwarp();
    const float4 me = scratch.candidate[lane];
    const int expert = __float_as_int(me.z);
    const float score = weight_score(me.y);
    int rank = 0;
#pragma unroll 4
    for (int j = 0; j < total; ++j) {
      const float4 o = scratch.candidate[j];
      rank += before(o.x, __float_as_int(o.z), me.x, expert);
    }
    if (lane < total && rank < a.top_k) scratch.score[rank] = score, scratch.expert[rank] = expert;
  } else {
    select_by_rounds<VALUES>(z, v, a.experts, a.top_k, lane, scratch.score, scratch.expert);
    __syncwarp();
    if (lane < a.top_k) scratch.score[lane] = weight_score(scratch.score[lane]);
  }
  __syncwarp();
  const float4* s = reinterpret_cast<const float4*>(scratch.score);
  float sum = tree_sum8(s[0], s[1]);
  if (a.top_k > 8) sum += tree_sum8(s[2], s[3]);
  if (lane < a.top_k) {
    const float weight = routing_weight(a, scratch.score[lane], sum);
    store_choice(a, token, lane, scratch.expert[lane], weight);
  }
}

__device__ __forceinline__ void store_padding(const GateArgs& a, int token, int lane) {
  if (lane < a.top_k) store_choice(a, token, lane, 0, 0.0f);
}

template <int VALUES>
__global__ void __launch_bounds__(256, 2) gate_warp_kernel(GateArgs a) {
  __shared__ WarpScratch scratch[8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int token = blockIdx.x * (blockDim.x >> 5) + warp;
  cudaTriggerProgrammaticLaunchCompletion();
  float bias[VALUES], z[VALUES];
  load_row<VALUES>(a.bias, a.experts, lane, bias);  // constant: need not wait for the launch before this one
  cudaGridDependencySynchronize();
  if (token >= a.tokens) return;
  load_row<VALUES>(a.logits + static_cast<int64_t>(token) * a.experts, a.experts, lane, z);
  if (a.num_valid != nullptr && token >= *a.num_valid) store_padding(a, token, lane);
  else gate_token<VALUES>(a, z, bias, token, scratch[warp], lane);
}

}  // namespace gate
