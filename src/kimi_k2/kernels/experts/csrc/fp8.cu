// Host side of the blockwise FP8 experts: tensor maps and launches behind one C function.
#include "common/csrc/launch.cuh"
#include "fp8_kernel.cuh"
#include "fp8_prepare.cuh"
#include "fp8_wide.cuh"

namespace moe {

static int encode(CUtensorMap* map, const void* weights, uint64_t columns, uint64_t rows) {
  return host::encode_rows(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, weights, columns, rows, kTileRows);
}

template <int NMAX, int STAGES, bool FUSED>
static int launch_main(const Fp8Args& a, const CUtensorMap& m13, const CUtensorMap& m2, cudaStream_t stream) {
  auto kernel = moe_fp8_kernel<NMAX, STAGES, FUSED>;
  const size_t smem = sizeof(Fp8Smem<NMAX, STAGES, FUSED>);
  static_assert(sizeof(Fp8Smem<NMAX, STAGES, FUSED>) <= host::kMaxShared,
                "a block does not have so much shared memory");
  return host::launch(kernel, {dim3(a.grid), main_threads(FUSED, NMAX), smem, stream, bool(a.pdl)}, m13, m2, a);
}

// Both stages; the second needs the whole of the first, and begins when it has ended.
template <int CLUSTER, int STAGE, bool KEPT>
static int launch_stage(const Fp8Args& a, const CUtensorMap& map, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(WideSmem<KEPT>);
  static_assert(kBytes <= host::kMaxShared, "a block does not have so much shared memory");
  const host::Launch how{dim3(a.grid / CLUSTER * CLUSTER), kWideThreads, kBytes, stream, bool(a.pdl), CLUSTER};
  return host::launch(moe_fp8_wide_kernel<CLUSTER, STAGE, KEPT>, how, map, a);
}
template <int CLUSTER>
static int launch_wide(const Fp8Args& a, const CUtensorMap& m13, const CUtensorMap& m2, cudaStream_t stream) {
  if (a.splits1 > 1) return host::kBadSplits;
  if (int rc = launch_stage<CLUSTER, 0, false>(a, m13, stream)) return rc;
  if constexpr (CLUSTER > 1)
    if (a.inter <= 256) return launch_stage<CLUSTER, 1, true>(a, m2, stream);
  return launch_stage<CLUSTER, 1, false>(a, m2, stream);
}

}  // namespace moe

// Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_moe_fp8(const moe::Fp8Args* args, void* stream_ptr) {
  using namespace moe;
  const Fp8Args& a = *args;
  cudaStream_t stream = static_cast<cudaStream_t>(stream_ptr);
  CUtensorMap m13, m2;
  if (int rc = encode(&m13, a.w13, a.hidden, (uint64_t)a.experts * 2 * a.inter)) return rc;
  if (int rc = encode(&m2, a.w2, a.inter, (uint64_t)a.experts * a.hidden)) return rc;
  if (a.fused) return launch_main<16, 6, true>(a, m13, m2, stream);
  if (int rc = host::launch(prepare_kernel, {dim3(a.grid), 1024, 0, stream, bool(a.pdl)}, a)) return rc;
  int rc = host::kNoInstance;
  if (a.nmax == 32) rc = launch_main<32, 5, false>(a, m13, m2, stream);
  if (a.nmax == 64) rc = launch_main<64, 4, false>(a, m13, m2, stream);
  if (a.nmax == kWideTokens) rc = launch_wide<1>(a, m13, m2, stream);
  if (a.nmax == 2 * kWideTokens) rc = launch_wide<2>(a, m13, m2, stream);
  if (rc || a.top_k * a.splits2 == 1 || sums_slabwise(a)) return rc;
  const auto combine = a.nmax >= kWideTokens ? combine_kernel<true> : combine_kernel<false>;
  const int warps = a.tokens < 2048 ? a.hidden / 256 : 4;  // of a token; few look its parts up less often
  return host::launch(combine, {dim3((a.tokens + 7) / 8, warps), 256, 0, stream, bool(a.pdl)}, a,
                      output_bytes(a) <= kCachedOutputBytes);
}
