// Host side of MLA decode attention: tensor maps and launches behind one C function.
#include "launch.cuh"
#include "mla_decode.cu"

namespace mla {

// Rows of 576 bfloat16 in boxes of `box_rows` rows of 64 columns; rows past the tensor's end arrive as zeros.
static int encode(CUtensorMap* map, const void* base, int64_t rows, int box_rows) {
  const auto encode_tiled = host::tensor_map_encoder();
  if (!encode_tiled) return 1000;
  const cuuint64_t sizes[2] = {kRow, cuuint64_t(rows)}, strides[1] = {kRow * 2};
  const cuuint32_t box[2] = {64, cuuint32_t(box_rows)}, step[2] = {1, 1};
  return encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), sizes, strides, box, step,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
             ? 1001
             : 0;
}

template <bool FEW>
static int launch_attend(const CUtensorMap& query, const CUtensorMap& cache, const Arguments& a, cudaStream_t stream) {
  static_assert(sizeof(Memory<FEW>) <= 232448, "shared memory of one block");
  const host::Launch how = {dim3(a.splits, a.batch), kThreads, sizeof(Memory<FEW>), stream, true, a.cluster};
  return host::launch(attend<FEW>, how, query, cache, a);
}

}  // namespace mla

// Returns 0, a cudaError_t, or 1000 and above for errors of our own.
extern "C" int kimi_mla_decode(const void* q, const void* cache, int64_t cache_rows, const mla::Arguments* args, int few,
                               void* stream_ptr) {
  using namespace mla;
  const Arguments& a = *args;
  auto stream = static_cast<cudaStream_t>(stream_ptr);
  if (few && a.heads != 8) return 1002;
  CUtensorMap query_map, cache_map;
  if (int rc = encode(&query_map, q, int64_t(a.batch) * a.heads, a.heads)) return rc;
  if (int rc = encode(&cache_map, cache, cache_rows, kRows)) return rc;
  const auto attend_as = few ? launch_attend<true> : launch_attend<false>;
  if (int rc = attend_as(query_map, cache_map, a, stream)) return rc;
  Arguments joined = a;
  joined.splits = a.splits / a.cluster;
  if (joined.splits == 1) return 0;
  const int rows = a.batch * a.heads;
  if (joined.splits < 16) return host::launch(join<1>, {dim3(rows), kJoinThreads, 0, stream}, joined);
  return host::launch(join<4>, {dim3(rows, 4), kJoinThreads, 0, stream}, joined);
}
