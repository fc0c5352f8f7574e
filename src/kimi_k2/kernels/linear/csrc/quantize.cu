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
};

__device__ __forceinline__ void store_group(const QuantizeArguments& a, int token, int v, const uint4 value) {
  float x[8], scale;
  decode::widen(value, x);
  const uint2 fp8 = ptx::quantize_eight(x, scale);
  if (v >= a.columns / 8) return;
  uint2* out = reinterpret_cast<uint2*>(a.out) + int64_t(token) * (a.columns / 8) + v;
  *out = fp8;
  if (a.terms == 2) out[int64_t(a.tokens) * (a.columns / 8)] = ptx::quantize_rest(x, scale, fp8);
  if (v % 16 == 0) a.scale[int64_t(v / 16) * a.scale_stride + token] = scale;
}

// A block a token, EACH times eight values a thread: one where few blocks run, so that a token takes little time;
// several where many do, so that more tokens are under way on an SM.
template <int EACH>
__global__ void __launch_bounds__(1024 / EACH) quantize_norm(const QuantizeArguments a) {
  __shared__ float sums[32];
  decode::pdl_launch();
  const int thread = threadIdx.x, groups = a.columns / 8, token = blockIdx.x;
  uint4 weight[EACH], value[EACH], delta[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int v = thread + i * blockDim.x;
    weight[i] = v < groups ? __ldg(reinterpret_cast<const uint4*>(a.norm) + v) : make_uint4(0, 0, 0, 0);
  }
  decode::pdl_wait();
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int v = thread + i * blockDim.x;
    value[i] = delta[i] = make_uint4(0, 0, 0, 0);
    if (v >= groups) continue;
    value[i] = __ldcg(reinterpret_cast<const uint4*>(a.x + int64_t(token) * a.x_stride) + v);
    if (a.delta != nullptr) delta[i] = __ldcg(reinterpret_cast<const uint4*>(a.delta) + int64_t(token) * groups + v);
  }
  // 256 values a sum of a warp's, whatever EACH is: a token's bits do not depend on how many tokens there are.
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int v = thread + i * blockDim.x;
    if (a.delta != nullptr) {
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
  for (int i = 0; i < EACH; ++i)
    store_group(a, token, thread + i * blockDim.x, decode::normed8(value[i], inverse, weight[i]));
}

// Nothing of a token but its own group of 128 is needed: blocks take 256 groups of eight values, whatever the tokens.
template <bool SWIGLU>
__global__ void __launch_bounds__(256) quantize_groups(const QuantizeArguments a) {
  decode::pdl_launch();
  const int groups = a.columns / 8;
  const unsigned place = blockIdx.x * 256u + threadIdx.x;
  const int found = place / groups, v = place - found * groups;
  const bool here = found < a.tokens;
  const int token = here ? found : 0;
  decode::pdl_wait();
  uint4 value = make_uint4(0, 0, 0, 0);
  if (here) {
    const uint4* row = reinterpret_cast<const uint4*>(a.x + int64_t(token) * a.x_stride);
    value = __ldcg(row + v);
    if (SWIGLU) {
      float gate[8], up[8];
      decode::widen(value, gate);
      decode::widen(__ldcg(row + a.columns / 8 + v), up);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // silu is rounded before the product, as the plain functions do.
        const __nv_bfloat162 silu = __floats2bfloat162_rn(__fdividef(gate[2 * i], 1.f + __expf(-gate[2 * i])),
                                                          __fdividef(gate[2 * i + 1], 1.f + __expf(-gate[2 * i + 1])));
        reinterpret_cast<__nv_bfloat162*>(&value)[i] = __hmul2(silu, __floats2bfloat162_rn(up[2 * i], up[2 * i + 1]));
      }
    }
  }
  store_group(a, token, here ? v : groups, value);
}

}  // namespace linear

// `swiglu`: x is gate | up.
extern "C" int kimi_quantize(const void* x, const void* delta, const void* norm, void* total, void* out, void* scale,
                             int tokens, int columns, int x_stride, int scale_stride, int terms, int swiglu, float eps,
                             void* stream) {
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
                                    eps};
  const int padded = (columns / 8 + 31) / 32 * 32;
  if (norm != nullptr) {
    if (padded > 1024) return host::kNoInstance;
    constexpr int kEach = 4;
    if (tokens <= 132) return decode::launch(linear::quantize_norm<1>, dim3(tokens), padded, 0, a, stream);
    const int threads = ((padded + kEach - 1) / kEach + 31) / 32 * 32;
    return decode::launch(linear::quantize_norm<kEach>, dim3(tokens), threads, 0, a, stream);
  }
  const auto kernel = swiglu ? linear::quantize_groups<true> : linear::quantize_groups<false>;
  return decode::launch(kernel, dim3((int64_t(tokens) * (columns / 8) + 255) / 256), 256, 0, a, stream);
}
