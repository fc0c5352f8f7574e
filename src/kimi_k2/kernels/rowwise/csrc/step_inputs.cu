// What a step's layers are told of its new tokens: lengths, positions and slots, cos and sin.
#include "norm.cuh"

namespace decode {

struct PlaceArguments {
  int* seq_lens;
  int* input_ids;  // null: positions are given, negative for padding; else lengths are, zero for padding
  int64_t* positions;
  int64_t* slots;
  const int* block_table;
  int tokens, each, wide, page;  // `each` tokens a row of the table, of `wide` pages
};

__global__ void __launch_bounds__(kThreads) places(const PlaceArguments a) {
  pdl_launch();
  const int at = blockIdx.x * kThreads + threadIdx.x;
  pdl_wait();
  if (at >= a.tokens) return;
  const bool follows = a.input_ids != nullptr;
  const int length = follows ? a.seq_lens[at] : int(a.positions[at]) + 1, position = follows ? length : length - 1;
  const bool there = length > 0;
  if (follows) {
    a.positions[at] = position;
    if (!there) a.input_ids[at] = 0;
  }
  a.seq_lens[at] = there ? position + 1 : 0;
  a.slots[at] =
      there ? int64_t(a.block_table[int64_t(at / a.each) * a.wide + position / a.page]) * a.page + position % a.page
            : -1;
}

struct RotaryArguments {
  const int64_t* positions;  // [tokens]
  const float* inv_freq;     // [pairs]
  __nv_bfloat16* cos;        // [tokens, pairs]
  __nv_bfloat16* sin;
  int tokens, pairs;
  float multiplier;
};

// The bits of PyTorch: float32 angles, functions and products, rounded at the end.
__global__ void __launch_bounds__(kThreads) rotary(const RotaryArguments a) {
  pdl_launch();
  const int at = blockIdx.x * kThreads + threadIdx.x, token = at / a.pairs;
  pdl_wait();
  if (token >= a.tokens) return;
  const float angle = float(a.positions[token]) * a.inv_freq[at % a.pairs];
  a.cos[at] = __float2bfloat16(cosf(angle) * a.multiplier);
  a.sin[at] = __float2bfloat16(sinf(angle) * a.multiplier);
}

template <class Arguments>
int start(void (*kernel)(const Arguments), int values, const Arguments& a, void* stream) {
  return launch(kernel, dim3((values + kThreads - 1) / kThreads), kThreads, 0, a, stream);
}

}  // namespace decode

extern "C" int kimi_places(const decode::PlaceArguments* a, void* stream) {
  return decode::start(decode::places, a->tokens, *a, stream);
}

extern "C" int kimi_rotary(const decode::RotaryArguments* a, void* stream) {
  return decode::start(decode::rotary, a->tokens * a->pairs, *a, stream);
}
