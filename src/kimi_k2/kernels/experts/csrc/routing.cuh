// Which of a token's chosen experts count, for kernels that take one token-expert pair at a time. `Arguments` has
// topk_indices (int64 or int32 [tokens, top_k]), topk_weights, expert_map, top_k, experts, num_global and ids64.
#pragma once
#include "common/csrc/decode.cuh"

namespace decode {

constexpr int kMaxSlots = 17;  // 16 routed experts of a token and a shared one
constexpr int kShared = 0xffff;

// What the router chose for a pair. Past the first-level cache: a second launch reads it while the first still runs,
// which the router's launch has preceded.
struct Choice {
  long long id;
  float weight;
};
template <class Arguments>
__device__ __forceinline__ Choice load_choice(const Arguments& a, int pair) {
  return {a.ids64 ? __ldcg(static_cast<const long long*>(a.topk_indices) + pair)
                  : __ldcg(static_cast<const int*>(a.topk_indices) + pair),
          __ldcg(a.topk_weights + pair)};
}

// Its local expert, -1 if it does not count.
template <class Arguments>
__device__ __forceinline__ int local_expert(const Arguments& a, const Choice& choice) {
  if (choice.id < 0 || choice.id >= a.num_global || choice.weight == 0.f) return -1;
  const int expert = a.expert_map != nullptr ? __ldg(a.expert_map + choice.id) : static_cast<int>(choice.id);
  return expert >= 0 && expert < a.experts ? expert : -1;
}

// Local expert of a pair, -1 if it does not count; its weight too.
template <class Arguments>
__device__ __forceinline__ int routed_expert(const Arguments& a, int pair, float& weight) {
  const Choice choice = load_choice(a, pair);
  weight = choice.weight;
  return local_expert(a, choice);
}

// The pairs of a token that count, in order; a warp makes and reads its own.
struct Pairs {
  int entry[kMaxSlots];  // slot << 16 | expert, kShared for the shared one
  float weight[kMaxSlots];
};

// Slots are the shared expert, if `with_shared`, and then the routed ones. Returns how many count.
template <class Arguments>
__device__ __forceinline__ int list_pairs(const Arguments& a, int token, bool with_shared, Pairs& pairs) {
  const int lane = threadIdx.x % 32;
  const bool shared = with_shared && lane == 0;
  int expert = shared ? kShared : -1;
  float weight = 1.f;
  if (lane < a.top_k + with_shared && !shared) expert = routed_expert(a, token * a.top_k + lane - with_shared, weight);
  const unsigned valid = __ballot_sync(kAll, expert >= 0);
  if (expert >= 0) {
    const int at = __popc(valid & ((1u << lane) - 1));
    pairs.entry[at] = lane << 16 | expert;
    pairs.weight[at] = weight;
  }
  __syncwarp();
  return __popc(valid);
}

}  // namespace decode
