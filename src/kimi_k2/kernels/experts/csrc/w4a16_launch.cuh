// Host side of the four-bit experts: the launches behind one C function.
#pragma once
#include "common/csrc/launch.cuh"
#include "w4a16_kernel.cuh"
#include "w4a16_prepare.cuh"

namespace w4a16 {

static int launch(void (*kernel)(Args), dim3 grid, int threads, size_t smem, cudaStream_t stream, const Args& args) {
  return host::launch(kernel, {grid, threads, smem, stream, bool(args.pdl)}, args);
}

template <class C>
static int launch_main(const Args& a, cudaStream_t stream) {
  constexpr size_t kSmem = sizeof(Smem<C>);
  static_assert(kSmem <= host::kMaxShared, "a block does not have so much shared memory");
  if (a.splits1 > 1 && C::NMAX > 32) return host::kBadSplits;
  if (a.inner > 1 && !(C::INNER && a.splits1 == 1)) return host::kBadSplits;
  if (a.in_flight < 1 || a.in_flight > C::STAGES) return host::kBadStages;
  return launch(w4a16_kernel<C>, dim3(a.grid), C::THREADS, kSmem, stream, a);
}

template <class F, bool W2_BF16>
static int launch_all(const Args& a, cudaStream_t stream) {
  if (!W2_BF16 && a.nmax <= 32) {
    const int64_t records = (int64_t)a.tokens * (a.hidden / 128);
    if (int rc = launch(encode_kernel, dim3((records + 7) / 8), 256, 0, stream, a)) return rc;
  }
  if (a.fused) return launch_main<Config<F, 16, 8, W2_BF16 ? 4 : 2, true, W2_BF16>>(a, stream);
  const int blocks = min(a.grid, (a.tokens * a.top_k + kSortThreads - 1) / kSortThreads);
  if (int rc = launch(count_kernel, dim3(blocks), kSortThreads, 0, stream, a)) return rc;
  if (int rc = launch(scatter_kernel, dim3(blocks), kSortThreads, 0, stream, a)) return rc;
  int rc = host::kNoInstance;
  if (a.nmax == 32 && a.inner > 1)
    rc = launch_main<Config<F, 32, W2_BF16 ? 8 : 6, W2_BF16 ? 4 : 2, false, W2_BF16, true>>(a, stream);
  else if (a.nmax == 32) rc = launch_main<Config<F, 32, W2_BF16 ? 8 : 6, W2_BF16 ? 4 : 2, false, W2_BF16>>(a, stream);
  if (a.nmax == 64) rc = launch_main<Config<F, 64, 6, 2, false, W2_BF16>>(a, stream);
  if (a.nmax == 128) rc = launch_main<Config<F, 128, 4, 2, false, W2_BF16>>(a, stream);
  if (rc) return rc;
  const dim3 grid((a.tokens + 7) / 8, a.hidden / 256);
  const float factor = !W2_BF16 && a.nmax > 32 ? kUp : 1.f;
  return host::launch(sum_kernel, {grid, 256, 0, stream, bool(a.pdl)}, a, factor);
}

}  // namespace w4a16
