// Host side of dense_gemm.cuh: tensor maps and the launch behind one C function.
#include "common/csrc/launch.cuh"
#include "dense_gemm.cuh"

namespace linear {

// As many stages as fit the shared memory of an SM's blocks, at most eight.
template <int GROUPS, int TOKENS>
constexpr int dense_stages() {
  constexpr size_t kShare = host::kMaxShared / Registers<GROUPS>::kBlocks - 1024 * (Registers<GROUPS>::kBlocks - 1);
  constexpr size_t kStage = (64 * GROUPS + TOKENS) * 128 + 16;
  return (kShare - 1024) / kStage < 8 ? (kShare - 1024) / kStage : 8;
}

template <int GROUPS, int TOKENS, bool WIDE>
int start_dense(const GemmArguments& a, const void* weight, const void* x, cudaStream_t stream) {
  constexpr int kStages = dense_stages<GROUPS, TOKENS>();
  using Memory = DenseMemory<GROUPS, TOKENS, kStages>;
  static_assert(kStages > 2, "too few requests under way");
  static_assert(sizeof(Memory) <= host::kMaxShared / Registers<GROUPS>::kBlocks, "more than an SM's blocks have");
  const int tiles = ((a.rows + Memory::kRows - 1) / Memory::kRows) * ((a.tokens + TOKENS - 1) / TOKENS);
  CUtensorMap weights, tokens;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (int rc = host::encode_rows(&weights, kType, 2, weight, a.columns, a.rows, Memory::kRows)) return rc;
  if (int rc = host::encode_rows(&tokens, kType, 2, x, a.token_stride, a.tokens, TOKENS)) return rc;
  return host::launch(dense_gemm<GROUPS, TOKENS, kStages, WIDE>,
                      {dim3(tiles * a.cluster), Registers<GROUPS>::kThreads, sizeof(Memory), stream, true, a.cluster},
                      weights, tokens, a);
}

template <bool WIDE>
int dense_by_tokens(const GemmArguments& a, const void* weight, const void* x, cudaStream_t stream) {
  // Of few rows many tokens are cut finer, so that more SMs have a tile.
  constexpr int kEnough = 96;
  const int each = (a.rows + 63) / 64 * a.cluster;
  const auto few = [&](int tile) { return (a.tokens + tile - 1) / tile * each < kEnough; };
  if (a.tokens <= 16 || (a.tokens <= 256 && few(32))) return start_dense<1, 16, WIDE>(a, weight, x, stream);
  if (a.tokens <= 32 || (a.tokens <= 512 && few(64))) return start_dense<1, 32, WIDE>(a, weight, x, stream);
  if (a.tokens <= 64 || (a.tokens <= 2048 && few(256))) return start_dense<1, 64, WIDE>(a, weight, x, stream);
  return start_dense<2, 128, WIDE>(a, weight, x, stream);
}

}  // namespace linear

// A token's row is `x_stride` values long, of which the first `columns` count. `out` is bf16 [tokens, rows], float32 if
// `wide`; `inverse` is null or [tokens], times which sums are taken. Returns
// 0, a cudaError_t, or a host::Error.
extern "C" int kimi_dense_gemm(const void* x, const void* weight, const void* inverse, void* out, int tokens, int rows,
                               int columns, int x_stride, int cluster, int wide, void* stream) {
  if (cluster < 1 || cluster > 8 || cluster > columns / 64) return host::kNoInstance;
  const linear::GemmArguments a{nullptr,  nullptr, static_cast<__nv_bfloat16*>(out),  tokens, rows, columns,
                                x_stride, cluster, static_cast<const float*>(inverse)};
  const auto s = static_cast<cudaStream_t>(stream);
  return wide ? linear::dense_by_tokens<true>(a, weight, x, s) : linear::dense_by_tokens<false>(a, weight, x, s);
}
