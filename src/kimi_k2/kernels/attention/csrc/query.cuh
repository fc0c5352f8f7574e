// Arguments of the launches from attention's first GEMMs to its query (query.cu, query_few.cu).
#pragma once
#include "entry.cuh"

namespace decode {

constexpr int kInput = 1536;  // columns of q_b

// The rows of `qkv_a` are kv_stride apart.
struct QueryArguments : EntryArguments {
  const __nv_bfloat16* qkv_a;   // [tokens, 1536 + 576]: q_a | latent before its norm | key before RoPE
  const __nv_bfloat16* q_norm;  // [1536]
  const uint8_t* q_b;           // e4m3 [heads * 192, 1536], or bf16
  const float* q_b_scale;       // [ceil(heads * 192 / 128), 12], null of bf16
  int parts;                    // of q_b's columns, summed apart: query_few.cu alone
  float q_eps;
};

}  // namespace decode
