// Host side of the INT4 experts: the launches behind one C function.
#include "moe_fp8_prepare.cuh"
#include "w4a16.cu"

namespace w4a16 {

template <class A>
static int launch(void (*kernel)(A), dim3 grid, int threads, size_t smem, cudaStream_t stream, const A& args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {grid, dim3(threads), smem, stream, &attribute, args.pdl ? 1u : 0u};
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <class C>
static int launch_main(const Args& a, cudaStream_t stream) {
  constexpr size_t kSmem = sizeof(Smem<C>);
  static_assert(kSmem <= 232448, "shared memory of one block");
  if (a.in_flight < 1 || a.in_flight > C::STAGES) return 1003;
  if (int rc = cudaFuncSetAttribute(w4a16_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem)) return rc;
  return launch(w4a16_kernel<C>, dim3(a.grid), C::THREADS, kSmem, stream, a);
}

template <bool W2_BF16>
static int launch_all(const Args& a, cudaStream_t stream) {
  if (a.fused) return launch_main<Config<16, 8, 4, true, W2_BF16>>(a, stream);
  if (int rc = launch<moe::Fp8Args>(moe::prepare_kernel, dim3(1), 1024, 0, stream, a)) return rc;
  int rc = 1002;
  if (a.nmax == 32) rc = launch_main<Config<32, 8, 4, false, W2_BF16>>(a, stream);
  if (a.nmax == 64) rc = launch_main<Config<64, 6, 2, false, W2_BF16>>(a, stream);
  if (a.nmax == 128) rc = launch_main<Config<128, 4, 2, false, W2_BF16>>(a, stream);
  if (rc) return rc;
  const dim3 grid(a.tokens, (a.hidden + 1023) / 1024);
  return launch<moe::Fp8Args>(moe::combine_kernel, grid, 128, 0, stream, a);
}

}  // namespace w4a16

// Returns 0, a cudaError_t, or 1000 and above for errors of our own.
extern "C" int kimi_w4a16(const w4a16::Args* args, void* stream_ptr) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_ptr);
  return args->w2_bf16 ? w4a16::launch_all<true>(*args, stream) : w4a16::launch_all<false>(*args, stream);
}
