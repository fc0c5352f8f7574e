// Rows of bf16 to e4m3 in groups of 128 with a float32 scale each, in one term or two, as block_gemm.cuh takes them,
// and what may come before: a residual sum, RMSNorm, silu(gate) * up. The norm's and the product's results are rounded
// to bf16 first, as they are where they are launches of their own.
#include "common/csrc/quantize.cuh"
#include "rowwise/csrc/norm.cuh"

namespace linear {

struct QuantizeArguments {
  const __nv_bfloat16* x;      // [tokens, columns], rows x_stride values apart; [tokens, 2 columns] gate | up
  const __nv_bfloat16* delta;  // [tokens, columns] or null
  const __nv_bfloat16* norm;   // [columns] or null
  __nv_bfloat16* total;        // x + delta
  unsigned char* out;          // [terms, tokens, columns]
  float* scale;                // [columns / 128, scale_stride]
  int tokens, columns, x_stride, scale_stride, terms;
  float eps;
  int apart;  // the norm's quotient is part of the scales, not of the values
};

__device__ __forceinline__ void store_group(const QuantizeArguments& a, int token, int v, const uint4 value,
                                            float factor = 1.f) {
  float x[8], scale;
  decode::widen(value, x);
  const uint2 fp8 = ptx::quantize_eight(x, scale);
  if (v >= a.columns / 8) return;
  uint2* out = reinterpret_cast<uint2*>(a.out) + int64_t(token) * (a.columns / 8) + v;
  *out = fp8;
  if (a.terms == 2) out[int64_t(a.tokens) * (a.columns / 8)] = ptx::quantize_rest(x, scale, fp8);
  if (v % 16 == 0) a.scale[int64_t(v / 16) * a.scale_stride + token] = scale * factor;
}

// A block a token, EACH times eight values a thread: one where few blocks run, so that a token takes little time;
// several where many do, so that more tokens are under way on an SM. Where they do not all run at once the norm's
// weight, which the SM's blocks find in its L1, is not asked for EARLY: held in registers it leaves room for fewer.
template <int EACH, bool ADDED, bool EARLY>
__global__ void __launch_bounds__(1024 / EACH, EARLY ? 1 : 5) quantize_norm(const QuantizeArguments a) {
  __shared__ float sums[32];
  decode::pdl_launch();
  const int thread = threadIdx.x, groups = a.columns / 8, token = blockIdx.x;
  const auto weight_of = [&](int v) {
    const uint4* from = reinterpret_cast<const uint4*>(a.norm) + v;
    return v >= groups ? make_uint4(0, 0, 0, 0) : EARLY ? decode::load_early(from) : __ldg(from);
  };
  uint4 value[EACH], weight[EARLY ? EACH : 1];
#pragma unroll
  for (int i = 0; i < EACH && EARLY; ++i) weight[i] = weight_of(thread + i * blockDim.x);
  decode::pdl_wait();
  uint4 delta[ADDED ? EACH : 1];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int v = thread + i * blockDim.x;
    value[i] = make_uint4(0, 0, 0, 0);
    if constexpr (ADDED) delta[i] = value[i];
    if (v >= groups) continue;
    value[i] = __ldcg(reinterpret_cast<const uint4*>(a.x + int64_t(token) * a.x_stride) + v);
    if constexpr (ADDED) delta[i] = __ldcg(reinterpret_cast<const uint4*>(a.delta) + int64_t(token) * groups + v);
  }
  // 256 values a sum of a warp's, whatever EACH is: a token's bits do not depend on how many tokens there are.
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int v = thread + i * blockDim.x;
    if constexpr (ADDED) {
      value[i] = decode::add8(value[i], delta[i]);
      if (v < groups) reinterpret_cast<uint4*>(a.total)[int64_t(token) * groups + v] = value[i];
    }
    const float sum = decode::sum_lanes(decode::squares8(value[i]));
    if (thread % 32 == 0) sums[v / 32] = sum;
  }
  __syncthreads();
  const float whole = decode::sum_lanes(thread % 32 < EACH * blockDim.x / 32 ? sums[thread % 32] : 0.f);
  const float inverse = rsqrtf(whole / a.columns + a.eps);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int v = thread + i * blockDim.x;
    const uint4 normed = decode::normed8(value[i], a.apart ? 1.f : inverse, EARLY ? weight[i] : weight_of(v));
    store_group(a, token, v, normed, a.apart ? inverse : 1.f);
  }
}

// Nothing of a token but its own group of 128 is needed: blocks take EACH times 256 groups of eight values, whatever
// the tokens.
template <bool SWIGLU, int EACH>
__global__ void __launch_bounds__(256) quantize_groups(const QuantizeArguments a) {
  decode::pdl_launch();
  const int groups = a.columns / 8;
  decode::pdl_wait();
  uint4 value[EACH], other[SWIGLU ? EACH : 1];
  int token[EACH], at[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const unsigned place = (blockIdx.x * EACH + i) * 256u + threadIdx.x;
    token[i] = place / groups, at[i] = place - token[i] * groups;
    value[i] = make_uint4(0, 0, 0, 0);
    if constexpr (SWIGLU) other[i] = value[i];
    if (token[i] >= a.tokens) {
      token[i] = 0, at[i] = groups;  // nothing is stored
      continue;
    }
    const uint4* row = reinterpret_cast<const uint4*>(a.x + int64_t(token[i]) * a.x_stride);
    value[i] = __ldcg(row + at[i]);
    if constexpr (SWIGLU) other[i] = __ldcg(row + groups + at[i]);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if constexpr (SWIGLU) {
      float gate[8], up[8];
      decode::widen(value[i], gate);
      decode::widen(other[i], up);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        // silu is rounded before the product, as the plain functions do.
        const __nv_bfloat162 silu = __floats2bfloat162_rn(__fdividef(gate[2 * k], 1.f + __expf(-gate[2 * k])),
                                                          __fdividef(gate[2 * k + 1], 1.f + __expf(-gate[2 * k + 1])));
        reinterpret_cast<__nv_bfloat162*>(&value[i])[k] =
            __hmul2(silu, __floats2bfloat162_rn(up[2 * k], up[2 * k + 1]));
      }
    }
    store_group(a, token[i], at[i], value[i]);
  }
}

// From so many groups of eight values on a thread takes several.
constexpr int64_t kManyGroups = 1 << 20;

template <int EACH>
int start_groups(const QuantizeArguments& a, bool swiglu, void* stream) {
  const auto kernel = swiglu ? quantize_groups<true, EACH> : quantize_groups<false, EACH>;
  return decode::launch(kernel, dim3((int64_t(a.tokens) * (a.columns / 8) + 256 * EACH - 1) / (256 * EACH)), 256, 0, a,
                        stream);
}

template <int EACH, bool EARLY = EACH == 1>
int start_norm(const QuantizeArguments& a, void* stream) {
  const int padded = (a.columns / 8 + 31) / 32 * 32, threads = ((padded + EACH - 1) / EACH + 31) / 32 * 32;
  const auto kernel = a.delta != nullptr ? quantize_norm<EACH, true, EARLY> : quantize_norm<EACH, false, EARLY>;
  return padded > 1024 ? host::kNoInstance : decode::launch(kernel, dim3(a.tokens), threads, 0, a, stream);
}

}  // namespace linear

// `swiglu`: x is gate | up.
extern "C" int kimi_quantize(const void* x, const void* delta, const void* norm, void* total, void* out, void* scale,
                             int tokens, int columns, int x_stride, int scale_stride, int terms, int swiglu, int apart,
                             float eps, void* stream) {
  const linear::QuantizeArguments a{static_cast<const __nv_bfloat16*>(x),
                                    static_cast<const __nv_bfloat16*>(delta),
                                    static_cast<const __nv_bfloat16*>(norm),
                                    static_cast<__nv_bfloat16*>(total),
                                    static_cast<unsigned char*>(out),
                                    static_cast<float*>(scale),
                                    tokens,
                                    columns,
                                    x_stride,
                                    scale_stride,
                                    terms,
                                    eps,
                                    apart};
  if (norm != nullptr) {
    if (tokens <= 132 || columns <= 2048) return linear::start_norm<1>(a, stream);
    return tokens <= 3 * 132 ? linear::start_norm<2, true>(a, stream) : linear::start_norm<4>(a, stream);
  }
  if (int64_t(tokens) * (columns / 8) < linear::kManyGroups) return linear::start_groups<1>(a, swiglu, stream);
  return swiglu ? linear::start_groups<2>(a, swiglu, stream) : linear::start_groups<4>(a, swiglu, stream);
}
