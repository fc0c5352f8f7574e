// The residual sum, unless `delta` is null, and the norm after it: one block a token, one group of 8 values a thread.
#include "norm.cuh"

namespace decode {

struct NormArguments {
  const __nv_bfloat16* x;
  const __nv_bfloat16* delta;
  const __nv_bfloat16* weight;
  __nv_bfloat16* total;
  __nv_bfloat16* normed;
  float* inverse;  // null, or [tokens]: the norm's quotient, which `normed` then lacks
  int columns, x_stride;
  float eps;
};

__global__ void __launch_bounds__(1024) add_norm(const NormArguments a) {
  __shared__ float sums[32];
  pdl_launch();
  const int v = threadIdx.x, groups = a.columns / 8;
  const bool here = v < groups;
  const int64_t at = int64_t(blockIdx.x) * groups + v;
  const uint4 weight = here ? load_early(reinterpret_cast<const uint4*>(a.weight) + v) : make_uint4(0, 0, 0, 0);
  pdl_wait();
  float value[8] = {};
  if (here) {
    const uint4 x = __ldcg(reinterpret_cast<const uint4*>(a.x + int64_t(blockIdx.x) * a.x_stride) + v);
    if (a.delta != nullptr) {
      sum8(x, __ldcg(reinterpret_cast<const uint4*>(a.delta) + at), value);
      reinterpret_cast<uint4*>(a.total)[at] = round8(value);
    } else {
      widen(x, value);
    }
  }
  const float sum = sum_lanes(squares8(value));
  if (v % 32 == 0) sums[v / 32] = sum;
  __syncthreads();
  const float whole = sum_lanes(v % 32 < blockDim.x / 32 ? sums[v % 32] : 0.f);
  const float inverse = rsqrtf(whole / a.columns + a.eps);
  if (here) reinterpret_cast<uint4*>(a.normed)[at] = normed8(value, a.inverse == nullptr ? inverse : 1.f, weight);
  if (a.inverse != nullptr && v == 0) a.inverse[blockIdx.x] = inverse;
}

}  // namespace decode

extern "C" int kimi_add_norm(const void* x, const void* delta, const void* weight, void* total, void* normed,
                             void* inverse, int tokens, int columns, int x_stride, float eps, void* stream) {
  const decode::NormArguments a{static_cast<const __nv_bfloat16*>(x),
                                static_cast<const __nv_bfloat16*>(delta),
                                static_cast<const __nv_bfloat16*>(weight),
                                static_cast<__nv_bfloat16*>(total),
                                static_cast<__nv_bfloat16*>(normed),
                                static_cast<float*>(inverse),
                                columns,
                                x_stride,
                                eps};
  const int threads = (columns / 8 + 31) / 32 * 32;
  return threads > 1024 ? host::kNoInstance : decode::launch(decode::add_norm, dim3(tokens), threads, 0, a, stream);
}
