// Two bf16 values to one, as PyTorch's launches round them: a + b, and silu(gate) * up. These overlap with their
// neighbours: PyTorch's own begin when all before them has ended, and what follows asks for its weights no sooner.
#include "norm.cuh"

namespace decode {

struct PairArguments {
  const uint4 *a, *b;  // b null: `a` has rows of gate | up
  uint4* out;
  int groups;  // of eight values of `out`
  int wide;    // groups of a row of gate
};

// silu is rounded before the product.
__device__ __forceinline__ uint4 swiglu8(const uint4 gate, const uint4 up) {
  uint4 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t g = (&gate.x)[i];
    const float first = low(g), second = high(g);
    reinterpret_cast<__nv_bfloat162*>(&out)[i] =
        __hmul2(__floats2bfloat162_rn(first / (1.f + expf(-first)), second / (1.f + expf(-second))),
                reinterpret_cast<const __nv_bfloat162*>(&up)[i]);
  }
  return out;
}

__global__ void __launch_bounds__(kThreads) pairs(const PairArguments a) {
  pdl_launch();
  const int at = blockIdx.x * kThreads + threadIdx.x;
  pdl_wait();
  if (at >= a.groups) return;
  if (a.b != nullptr) {
    a.out[at] = add8(__ldcg(a.a + at), __ldcg(a.b + at));
    return;
  }
  const uint4* gate = a.a + at + int64_t(at / a.wide) * a.wide;
  a.out[at] = swiglu8(__ldcg(gate), __ldcg(gate + a.wide));
}

}  // namespace decode

// `b` is null for silu(gate) * up, of rows of 2 * 8 `wide` values.
extern "C" int kimi_pairs(const void* a, const void* b, void* out, int groups, int wide, void* stream) {
  const decode::PairArguments given{static_cast<const uint4*>(a), static_cast<const uint4*>(b),
                                    static_cast<uint4*>(out), groups, wide};
  return decode::launch(decode::pairs, dim3((groups + decode::kThreads - 1) / decode::kThreads), decode::kThreads, 0,
                        given, stream);
}
