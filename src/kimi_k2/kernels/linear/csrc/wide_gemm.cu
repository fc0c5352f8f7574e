// Host side of wide_gemm.cuh: tensor maps and the launch behind one C function.
#include "wide_gemm.cuh"

#include "common/csrc/launch.cuh"

namespace linear {

// As many stages as fit the shared memory of an SM.
template <int TERMS, int STAGES = 8>
constexpr int wide_stages() {
  if constexpr (sizeof(WideMemory<TERMS, STAGES>) <= host::kMaxShared) return STAGES;
  else return wide_stages<TERMS, STAGES - 1>();
}

template <int TERMS>
int start_wide(const WideArguments& a, const void* weight, const void* x, void* out, int sms, cudaStream_t stream) {
  constexpr int kStages = wide_stages<TERMS>();
  static_assert(kStages > 2, "too few requests under way");
  const int tiles = ((a.rows + kWideRows - 1) / kWideRows) * ((a.tokens + kWideTokens - 1) / kWideTokens);
  CUtensorMap weights, tokens, outputs;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (int rc = host::encode_rows(&weights, kType, 1, weight, a.columns, a.rows, kWideRows)) return rc;
  if (int rc = host::encode_rows(&tokens, kType, 1, x, a.columns, TERMS * a.tokens, kWideTokens)) return rc;
  if (int rc = host::encode_rows(&outputs, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, out, a.rows, a.tokens, 16)) return rc;
  return host::launch(wide_gemm<TERMS, kStages>,
                      {dim3(min(tiles, sms)), kWideThreads, sizeof(WideMemory<TERMS, kStages>), stream}, weights,
                      tokens, outputs, a);
}

}  // namespace linear

extern "C" int kimi_wide_gemm(const void* x, const void* token_scale, const void* weight, const void* weight_scale,
                              void* out, int terms, int tokens, int rows, int columns, int token_stride, int sms,
                              void* stream) {
  const linear::WideArguments a{static_cast<const float*>(token_scale),
                                static_cast<const float*>(weight_scale),
                                tokens,
                                rows,
                                columns,
                                token_stride};
  const auto s = static_cast<cudaStream_t>(stream);
  if (terms == 1) return linear::start_wide<1>(a, weight, x, out, sms, s);
  if (terms == 2) return linear::start_wide<2>(a, weight, x, out, sms, s);
  return host::kNoInstance;
}
