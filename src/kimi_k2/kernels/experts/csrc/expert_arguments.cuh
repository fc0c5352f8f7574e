// Arguments of the FP8 experts of a few tokens (fp8_decode.cu, fp8_few.cu), with the shared expert as one of a token's
// slots.
#pragma once
#include "routing.cuh"

namespace decode {

// Plain C layout: the Python side fills the same structure through ctypes.
struct ExpertArguments {
  const __nv_bfloat16* x;         // [tokens, hidden]
  const void* topk_indices;       // int64 or int32 [tokens, top_k]; < 0: invalid
  const float* topk_weights;      // [tokens, top_k]; 0: skipped
  const int* expert_map;          // [num_global] to the local expert or -1; may be null
  const uint8_t* gate_up;         // e4m3 [experts, 2 * inter, hidden]
  const float* gate_up_scale;     // [experts, 2 * inter / 128, hidden / 128]
  const uint8_t* down;            // e4m3 [experts, hidden, inter]
  const float* down_scale;        // [experts, hidden / 128, inter / 128]
  const uint8_t* shared_gate_up;  // null without a shared expert
  const float* shared_gate_up_scale;
  const uint8_t* shared_down;
  const float* shared_down_scale;
  float* intermediate;  // [tokens, slots, inter]; slot 0 is the shared expert's, if there is one
  __nv_bfloat16* out;   // [tokens, hidden]
  int tokens, top_k, experts, num_global, hidden, inter, ids64;
  int up_parts, shared_up_parts, shared_down_parts;  // fp8_few.cu: of the columns, summed apart
};

__device__ __forceinline__ int slots_of(const ExpertArguments& a) { return a.top_k + (a.shared_gate_up != nullptr); }

}  // namespace decode
