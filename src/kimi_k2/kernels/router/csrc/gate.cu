// Host side of the gate and of the router: the choice of a kernel's instance, behind two C functions.
#include "common/csrc/launch.cuh"
#include "gate_packed.cuh"
#include "route_norm.cuh"

namespace gate {

template <int EXPERTS, int KP, int WARPS>
static int launch_packed(const GateArgs& a, cudaStream_t stream) {
  constexpr size_t smem = sizeof(PackedSmem<EXPERTS, WARPS>);
  static_assert(smem <= host::kMaxShared, "a block does not have so much shared memory");
  const int groups = (a.tokens + 3) / 4, grid = groups < a.sm_count ? groups : a.sm_count;
  return host::launch(gate_packed_kernel<EXPERTS, KP, WARPS>,
                      {dim3(grid), WARPS * 32, smem, stream, bool(a.programmatic)}, a);
}

template <int VALUES>
static int launch_warp(const GateArgs& a, cudaStream_t stream) {
  const int grid = (a.tokens + a.warps - 1) / a.warps;
  return host::launch(gate_warp_kernel<VALUES>, {dim3(grid), a.warps * 32, 0, stream, bool(a.programmatic)}, a);
}

template <int EXPERTS>
static int launch_packed(const GateArgs& a, cudaStream_t stream) {
  constexpr int kWarps = EXPERTS == 256 ? 32 : 28;  // as many as registers allow
  return a.top_k > 8 ? launch_packed<EXPERTS, 16, 20>(a, stream) : launch_packed<EXPERTS, 8, kWarps>(a, stream);
}

template <int MT, int NT, int RESIDENT>
static int launch_router(const RouterArgs& a, cudaStream_t stream) {
  auto kernel = a.fused ? router_kernel<MT, NT, RESIDENT, true, false> : router_kernel<MT, NT, RESIDENT, false, false>;
  if (a.delta != nullptr) {
    if constexpr (NT == 1) kernel = router_kernel<MT, NT, RESIDENT, true, true>;
    if (NT > 1 || !a.fused || a.gate.experts < 32 * MT) return host::kNoInstance;
  }
  const dim3 grid(a.gate.experts / (16 * MT) * kSplits);
  constexpr size_t smem = sizeof(RouterSmem<MT, NT>);
  return host::launch(kernel, {grid, kRouterWarps * 32, smem, stream, bool(a.gate.programmatic), 1, host::kDecodeShare},
                      a);
}

}  // namespace gate

// All return 0, a cudaError_t, or a host::Error.
extern "C" int kimi_gate(const gate::GateArgs* args, void* stream_ptr) {
  using namespace gate;
  const GateArgs& a = *args;
  cudaStream_t stream = static_cast<cudaStream_t>(stream_ptr);
  if (a.packed && a.experts == 384) return launch_packed<384>(a, stream);
  if (a.packed) return a.experts == 256 ? launch_packed<256>(a, stream) : host::kNoInstance;
  if (a.experts <= 128) return launch_warp<4>(a, stream);
  if (a.experts <= 256) return launch_warp<8>(a, stream);
  if (a.experts <= 384) return launch_warp<12>(a, stream);
  return a.experts <= 512 ? launch_warp<16>(a, stream) : host::kNoInstance;
}

extern "C" int kimi_router(const gate::RouterArgs* args, void* stream_ptr) {
  using namespace gate;
  const RouterArgs& a = *args;
  cudaStream_t stream = static_cast<cudaStream_t>(stream_ptr);
  if (a.gate.tokens <= 8) return launch_router<1, 1, 2>(a, stream);
  if (a.gate.tokens <= 16) return launch_router<1, 2, 2>(a, stream);
  if (a.gate.tokens <= 32) return launch_router<2, 4, 1>(a, stream);
  return a.gate.tokens <= 64 ? launch_router<2, 8, 1>(a, stream) : host::kNoInstance;
}

extern "C" int kimi_route_norm(const void* x, const void* delta, const void* norm, void* total, void* normed,
                               void* unscaled, void* inverse, int tokens, int hidden, float eps, void* stream) {
  using namespace gate;
  const auto in = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
  const auto out = [](void* p) { return static_cast<__nv_bfloat16*>(p); };
  if (hidden > kNormGroups * kNormThreads * 8) return host::kNoInstance;
  const NormArgs a{in(x),  in(delta), in(norm), out(total), out(normed), out(unscaled), static_cast<float*>(inverse),
                   hidden, eps};
  return host::launch(route_norm_kernel, {dim3(tokens), kNormThreads, 0, static_cast<cudaStream_t>(stream)}, a);
}
