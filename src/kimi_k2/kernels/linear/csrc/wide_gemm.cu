// Host side of wide_gemm.cuh: tensor maps and the launch behind one C function.
#include "wide_gemm.cuh"

#include "common/csrc/launch.cuh"

namespace linear {

// As many stages as fit the shared memory of an SM's blocks, at most eight.
template <int GROUPS, int ROWS, int TERMS, int STAGES = 8>
constexpr int wide_stages() {
  using Block = WideBlock<GROUPS, ROWS>;
  constexpr size_t kBlocks = Block::kBlocks, kShare = host::kMaxShared / kBlocks - 1024 * (kBlocks - 1);
  if constexpr (STAGES % Block::kTurns == 0 && sizeof(WideMemory<GROUPS, ROWS, TERMS, STAGES>) <= kShare) return STAGES;
  else return wide_stages<GROUPS, ROWS, TERMS, STAGES - 1>();
}

template <int GROUPS, int ROWS, int TERMS>
int start_wide(const GemmArguments& a, const void* weight, const void* x, void* out, int sms, cudaStream_t stream) {
  constexpr int kStages = wide_stages<GROUPS, ROWS, TERMS>(), kBox = kWideBox<ROWS>;
  static_assert(kStages > 2, "too few requests under way");
  using Memory = WideMemory<GROUPS, ROWS, TERMS, kStages>;
  if (a.cluster > 1 && !kWideShared<ROWS>) return host::kNoInstance;
  if (a.columns / 128 < WideBlock<GROUPS, ROWS>::kTurns * a.cluster) return host::kNoInstance;  // a turn without any
  const int tiles = WideTiles<GROUPS, ROWS>(a).count();
  CUtensorMap weights, tokens, outputs;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (int rc = host::encode_rows(&weights, kType, 1, weight, a.columns, a.rows, ROWS)) return rc;
  if (int rc = host::encode_rows(&tokens, kType, 1, x, a.columns, TERMS * a.tokens, Memory::kTokens)) return rc;
  constexpr auto kOut = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (int rc = kBox == 64 ? host::encode_rows(&outputs, kOut, 2, out, a.rows, a.tokens, 16)
                          : host::encode_box(&outputs, kOut, 2, out, a.rows, a.tokens, kBox, 16))
    return rc;
  // A cluster takes one tile; otherwise as many blocks as run at once take them all.
  const int blocks = a.cluster > 1 ? tiles * a.cluster : min(tiles, sms * WideBlock<GROUPS, ROWS>::kBlocks);
  return host::launch(wide_gemm<GROUPS, ROWS, TERMS, kStages>,
                      {dim3(blocks), WideBlock<GROUPS, ROWS>::kThreads, sizeof(Memory), stream, true, a.cluster},
                      weights, tokens, outputs, a);
}

template <int TERMS>
int wide_by_tile(const GemmArguments& a, int groups, int tile, const void* weight, const void* x, void* out, int sms,
                 cudaStream_t stream) {
  switch (groups * 1000 + tile) {
    case 1064: return start_wide<1, 64, TERMS>(a, weight, x, out, sms, stream);
    case 1088: return start_wide<1, 88, TERMS>(a, weight, x, out, sms, stream);
    case 1096: return start_wide<1, 96, TERMS>(a, weight, x, out, sms, stream);
    case 1128: return start_wide<1, 128, TERMS>(a, weight, x, out, sms, stream);
    case 1144: return start_wide<1, 144, TERMS>(a, weight, x, out, sms, stream);
    case 1192: return start_wide<1, 192, TERMS>(a, weight, x, out, sms, stream);
    case 2064: return start_wide<2, 64, TERMS>(a, weight, x, out, sms, stream);
    case 2128: return start_wide<2, 128, TERMS>(a, weight, x, out, sms, stream);
    case 2144: return start_wide<2, 144, TERMS>(a, weight, x, out, sms, stream);
    case 2192: return start_wide<2, 192, TERMS>(a, weight, x, out, sms, stream);
  }
  return host::kNoInstance;
}

}  // namespace linear

extern "C" int kimi_wide_gemm(const void* x, const void* token_scale, const void* weight, const void* weight_scale,
                              void* out, int terms, int tokens, int rows, int columns, int token_stride, int groups,
                              int tile, int cluster, int sms, void* stream) {
  if (cluster < 1 || cluster > 8 || cluster > columns / 128) return host::kNoInstance;
  const linear::GemmArguments a{static_cast<const float*>(token_scale),
                                static_cast<const float*>(weight_scale),
                                static_cast<__nv_bfloat16*>(out),
                                tokens,
                                rows,
                                columns,
                                token_stride,
                                cluster};
  const auto s = static_cast<cudaStream_t>(stream);
  if (terms == 1) return linear::wide_by_tile<1>(a, groups, tile, weight, x, out, sms, s);
  if (terms == 2) return linear::wide_by_tile<2>(a, groups, tile, weight, x, out, sms, s);
  return host::kNoInstance;
}
