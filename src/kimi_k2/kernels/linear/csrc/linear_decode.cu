// GEMMs for few tokens, norm and residual sum before them optional: e4m3 weights as fp8_gemm.cuh says, bf16 ones
// here.
#include "fp8_gemm.cuh"

namespace decode {

// bf16 weights: a warp a row, LOADS of 512 bytes, AHEAD of them in flight.
template <int TOKENS, int LOADS, int AHEAD>
__global__ void __launch_bounds__(kThreads, 3) linear_bf16(const LinearArguments a) {
  DECODE_DYNAMIC_SHARED(uint4, token);
  __shared__ float sums[TOKENS][kWarps];
  constexpr int kColumns = LOADS * 256;
  const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32;
  const int64_t from = int64_t(row < a.rows ? row : 0) * ((kColumns / 8)) + lane;
  const uint4* weights = static_cast<const uint4*>(a.weight) + from;
  uint4 values[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) values[i] = load_once(weights + i * 32);
  request_norm<TOKENS, kColumns>(a, token);
  pdl_wait();
  prepare<TOKENS, kColumns, false>(a, token, sums);
  pdl_launch();

  float total[TOKENS] = {};
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    float w[8];
    widen(values[i % AHEAD], w);
    if (i + AHEAD < LOADS) values[i % AHEAD] = load_once(weights + (i + AHEAD) * 32);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      float x[8];
      widen(token[t * ((kColumns / 8)) + i * 32 + lane], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[t] += w[j] * x[j];
    }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    float sum = sum_lanes(total[t]);
    if (a.norm != nullptr) sum *= inverse_norm<kColumns>(a, sums[t]);
    if (lane == 0 && row < a.rows && t < a.tokens) a.out[int64_t(t) * a.rows + row] = __float2bfloat16(sum);
  }
}

template <int TOKENS, int LOADS>
int start_bf16(const LinearArguments& a, void* stream) {
  constexpr int kAhead = LOADS < 7 ? LOADS : 7;
  return launch(linear_bf16<TOKENS, LOADS, kAhead>, dim3((a.rows + kWarps - 1) / kWarps), kThreads,
                token_bytes<TOKENS, LOADS * 256>(), a, stream);
}

template <int TOKENS>
int by_columns_bf16(const LinearArguments& a, void* stream) {
  switch (a.columns) {
    case 256: return start_bf16<TOKENS, 1>(a, stream);
    case 512: return start_bf16<TOKENS, 2>(a, stream);
    case 1024: return start_bf16<TOKENS, 4>(a, stream);
    case 1536: return start_bf16<TOKENS, 6>(a, stream);
    case 2048: return start_bf16<TOKENS, 8>(a, stream);
    case 2304: return start_bf16<TOKENS, 9>(a, stream);
    case 4096: return start_bf16<TOKENS, 16>(a, stream);
    case 7168: return start_bf16<TOKENS, 28>(a, stream);
    default: return host::kNoInstance;
  }
}

// Steps are longest at one token; with more, kShare warps share the rows that one warp then takes alone.
template <int TOKENS>
int by_columns(const LinearArguments& a, void* stream) {
  constexpr int kSegments = TOKENS == 1 ? 8 : 2, kShare = 8 / kSegments;
  constexpr int kShorter = TOKENS == 1 ? 4 : 2, kShareShorter = 4 / kShorter;  // for widths that 512 does not divide
  switch (a.columns) {
    case 256: return start_gemm<TOKENS, kShorter, 1, 2, kShareShorter, 8 / kShareShorter>(a, stream);
    case 512: return start_gemm<TOKENS, kSegments, 1, 4, kShare, 8 / kShare>(a, stream);
    case 1024: return start_gemm<TOKENS, kSegments, 2, 4, kShare, 8 / kShare>(a, stream);
    case 1536:
      if constexpr (TOKENS == 1) return start_gemm<TOKENS, 8, 3, 1, 1, 8>(a, stream);
      else return start_gemm<TOKENS, 2, 1, 2, 12, 1>(a, stream);
    case 2048: return start_gemm<TOKENS, kSegments, 4, 2, kShare, 8 / kShare>(a, stream);
    case 2304: return start_gemm<TOKENS, kShorter, 9, 1, kShareShorter, 8 / kShareShorter>(a, stream);
    case 4096: return start_gemm<TOKENS, kSegments, 8, 1, kShare, 8 / kShare>(a, stream);
    case 7168:
      if constexpr (TOKENS == 1) return start_gemm<TOKENS, 8, 7, 1, 1, 8, 2>(a, stream);
      else if (a.rows <= 1024) return start_gemm<TOKENS, 2, 4, 2, 2, 4, 7>(a, stream);
      else return start_gemm<TOKENS, 2, 7, 1, 4, 4, 2>(a, stream);
    default: return host::kNoInstance;
  }
}

// The width for which two terms of e4m3 (block_gemm.cuh) are slower for so many tokens, too.
int by_columns_of_more(const LinearArguments& a, void* stream) {
  return a.columns == 1536 ? start_gemm<16, 2, 1, 2, 12, 1>(a, stream) : host::kNoInstance;
}

}  // namespace decode

extern "C" int kimi_linear_decode(const void* x, const void* delta, const void* weight, const void* scale,
                                  const void* norm, void* out, void* total, int tokens, int rows, int columns,
                                  int x_stride, float eps, void* stream) {
  const decode::LinearArguments a{static_cast<const __nv_bfloat16*>(x),
                                  static_cast<const __nv_bfloat16*>(delta),
                                  weight,
                                  static_cast<const float*>(scale),
                                  static_cast<const __nv_bfloat16*>(norm),
                                  static_cast<__nv_bfloat16*>(out),
                                  static_cast<__nv_bfloat16*>(total),
                                  tokens,
                                  rows,
                                  columns,
                                  x_stride,
                                  eps};
  if (scale == nullptr) {
    if (tokens == 1) return decode::by_columns_bf16<1>(a, stream);
    if (tokens == 2) return decode::by_columns_bf16<2>(a, stream);
    return tokens <= 4 ? decode::by_columns_bf16<4>(a, stream) : host::kNoInstance;
  }
  if (tokens == 1) return decode::by_columns<1>(a, stream);
  if (tokens <= 4) return decode::by_columns<4>(a, stream);
  if (tokens <= 8) return decode::by_columns<8>(a, stream);
  return tokens <= 16 ? decode::by_columns_of_more(a, stream) : host::kNoInstance;
}
