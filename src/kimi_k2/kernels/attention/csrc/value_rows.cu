// W_UV after attention at decode: out[b, h, v] = W_UV[h, v, :] . latent[b, h, :]. A warp takes one row, whose weight is
// asked for before attention has ended; of many tokens several rows of a head and some of the tokens, so that they are
// read less often. What a row's values are summed in is the same either way.
#include "common/csrc/decode.cuh"

namespace decode {

constexpr int kLatent = 512;

struct ValueArguments {
  const __nv_bfloat16* latent;  // [tokens, heads, 512]
  const __nv_bfloat16* weight;  // [heads, width, 512]
  __nv_bfloat16* out;           // [tokens, heads, width]
  int tokens, heads, width;
};

constexpr int kFewTokens = 8;  // of a block

template <int ROWS>
__global__ void __launch_bounds__(kThreads) value_rows(const ValueArguments a) {
  pdl_launch();
  const int lane = threadIdx.x % 32, row = (blockIdx.x * kWarps + threadIdx.x / 32) * ROWS, head = row / a.width;
  if (row >= a.heads * a.width) return;
  const uint4* at = reinterpret_cast<const uint4*>(a.weight + int64_t(row) * kLatent) + lane;
  uint4 raw[ROWS][2];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int i = 0; i < 2; ++i) raw[r][i] = load_early(at + r * (kLatent / 8) + i * 32);
  pdl_wait();
  const int first = blockIdx.y * kFewTokens, more = first + kFewTokens, end = more < a.tokens ? more : a.tokens;
  for (int t = first; t < end; ++t) {
    const uint4* latent = reinterpret_cast<const uint4*>(a.latent + int64_t(t * a.heads + head) * kLatent) + lane;
    const uint4 given[2] = {__ldcg(latent), __ldcg(latent + 32)};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float w[8], x[8];
        widen(raw[r][i], w);
        widen(given[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += w[j] * x[j];
      }
      sum = sum_lanes(sum);
      if (lane == 0) a.out[int64_t(t) * a.heads * a.width + row + r] = __float2bfloat16(sum);
    }
  }
}

template <int ROWS>
int start_values(const ValueArguments& a, void* stream) {
  const int warps = a.heads * a.width / ROWS;
  const dim3 grid((warps + kWarps - 1) / kWarps, (a.tokens + kFewTokens - 1) / kFewTokens);
  return launch(value_rows<ROWS>, grid, kThreads, 0, a, stream);
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
  return tokens > decode::kFewTokens && width % 4 == 0 ? decode::start_values<4>(a, stream)
                                                       : decode::start_values<1>(a, stream);
}
