// W_UV after attention at decode: out[b, h, v] = W_UV[h, v, :] . latent[b, h, :]. One warp a row, whose weight is asked
// for before attention has ended.
#include "common/csrc/decode.cuh"

namespace decode {

constexpr int kLatent = 512;

struct ValueArguments {
  const __nv_bfloat16* latent;  // [tokens, heads, 512]
  const __nv_bfloat16* weight;  // [heads, width, 512]
  __nv_bfloat16* out;           // [tokens, heads, width]
  int tokens, heads, width;
};

__global__ void __launch_bounds__(kThreads) value_rows(const ValueArguments a) {
  pdl_launch();
  const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32, head = row / a.width;
  if (row >= a.heads * a.width) return;
  const uint4* at = reinterpret_cast<const uint4*>(a.weight + int64_t(row) * kLatent) + lane;
  const uint4 raw[2] = {load_once(at), load_once(at + 32)};
  pdl_wait();
  for (int t = 0; t < a.tokens; ++t) {
    const uint4* latent = reinterpret_cast<const uint4*>(a.latent + int64_t(t * a.heads + head) * kLatent) + lane;
    const uint4 given[2] = {__ldcg(latent), __ldcg(latent + 32)};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float w[8], x[8];
      widen(raw[i], w);
      widen(given[i], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += w[j] * x[j];
    }
    sum = sum_lanes(sum);
    if (lane == 0) a.out[int64_t(t) * a.heads * a.width + row] = __float2bfloat16(sum);
  }
}

}  // namespace decode

extern "C" int kimi_value_rows(const void* latent, const void* weight, void* out, int tokens, int heads, int width,
                               void* stream) {
  const decode::ValueArguments a{static_cast<const __nv_bfloat16*>(latent),
                                 static_cast<const __nv_bfloat16*>(weight),
                                 static_cast<__nv_bfloat16*>(out),
                                 tokens,
                                 heads,
                                 width};
  const int rows = heads * width;
  return decode::launch(decode::value_rows, dim3((rows + decode::kWarps - 1) / decode::kWarps), decode::kThreads, 0, a,
                        stream);
}
