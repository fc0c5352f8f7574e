// Host side of block_gemm.cuh: tensor maps and the launch behind one C function.
#include "block_gemm.cuh"
#include "common/csrc/launch.cuh"

namespace linear {

// As many stages as fit the shared memory of an SM's blocks, at most eight.
template <int TOKENS, int TERMS>
constexpr int stages() {
  constexpr size_t kShare = host::kMaxShared / Registers<1>::kBlocks - 1024 * (Registers<1>::kBlocks - 1);
  constexpr size_t kStage = 64 * 128 + TERMS * TOKENS * 128 + TOKENS * 4 + 16;
  constexpr size_t kBesides = sizeof(GemmMemory<TOKENS, TERMS, 2>) - 2 * kStage + 1024;
  return (kShare - kBesides) / kStage < 8 ? (kShare - kBesides) / kStage : 8;
}

template <int TOKENS, int TERMS>
int start(const GemmArguments& a, const void* weight, const void* x, int sms, cudaStream_t stream) {
  constexpr int kStages = stages<TOKENS, TERMS>();
  using Memory = GemmMemory<TOKENS, TERMS, kStages>;
  static_assert(kStages > 2, "too few requests under way");
  static_assert(sizeof(Memory) <= host::kMaxShared / Registers<1>::kBlocks, "more than an SM's blocks have");
  const int tiles = ((a.rows + Memory::kRows - 1) / Memory::kRows) * ((a.tokens + TOKENS - 1) / TOKENS);
  CUtensorMap weights, tokens;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (int rc = host::encode_rows(&weights, kType, 1, weight, a.columns, a.rows, Memory::kRows)) return rc;
  if (int rc = host::encode_rows(&tokens, kType, 1, x, a.columns, TERMS * a.tokens, TOKENS)) return rc;
  // A cluster takes one tile; otherwise as many blocks as run at once take them all.
  const int blocks = a.cluster > 1 ? tiles * a.cluster : min(tiles, sms * Registers<1>::kBlocks);
  return host::launch(block_gemm<TOKENS, TERMS, kStages>,
                      {dim3(blocks), Registers<1>::kThreads, sizeof(Memory), stream, true, a.cluster}, weights, tokens,
                      a);
}

template <int TERMS>
int by_tile(const GemmArguments& a, int tile, const void* weight, const void* x, int sms, cudaStream_t stream) {
  switch (tile) {
    case 16: return start<16, TERMS>(a, weight, x, sms, stream);
    case 32: return start<32, TERMS>(a, weight, x, sms, stream);
    case 64: return start<64, TERMS>(a, weight, x, sms, stream);
  }
  return host::kNoInstance;
}

}  // namespace linear

extern "C" int kimi_block_gemm(const void* x, const void* token_scale, const void* weight, const void* weight_scale,
                               void* out, int terms, int tokens, int rows, int columns, int token_stride, int groups,
                               int tile, int cluster, int sms, void* stream) {
  if (groups != 1 || cluster < 1 || cluster > 8 || cluster > columns / 128) return host::kNoInstance;
  const linear::GemmArguments a{static_cast<const float*>(token_scale),
                                static_cast<const float*>(weight_scale),
                                static_cast<__nv_bfloat16*>(out),
                                tokens,
                                rows,
                                columns,
                                token_stride,
                                cluster};
  const auto s = static_cast<cudaStream_t>(stream);
  if (terms == 1) return linear::by_tile<1>(a, tile, weight, x, sms, s);
  if (terms == 2) return linear::by_tile<2>(a, tile, weight, x, sms, s);
  return host::kNoInstance;
}
