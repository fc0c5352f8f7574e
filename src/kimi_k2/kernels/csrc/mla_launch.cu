// Host side of MLA decode attention: tensor maps and launches behind one C function.
#include "launch.cuh"
#include "mla_decode.cu"

namespace mla {

// Rows of 576 bfloat16 in boxes of `box_rows` rows of `groups` x 64 columns; rows past the tensor's end arrive as zeros.
static int encode(CUtensorMap* map, const void* base, int64_t rows, int box_rows, int groups,
                  CUtensorMapL2promotion promotion) {
  const auto encode_tiled = host::tensor_map_encoder();
  if (!encode_tiled) return 1000;
  const int dimensions = groups > 1 ? 3 : 2;
  const cuuint64_t sizes[3] = {groups > 1 ? 64u : kRow, cuuint64_t(rows), kBoxes}, strides[2] = {kRow * 2, 128};
  const cuuint32_t box[3] = {64, cuuint32_t(box_rows), cuuint32_t(groups)}, step[3] = {1, 1, 1};
  return encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dimensions, const_cast<void*>(base), sizes, strides, box, step,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
             ? 1001
             : 0;
}

template <bool FEW, bool SLABS>
static int launch_attend(const CUtensorMap& query, const CUtensorMap& cache, const CUtensorMap& halves,
                         const Arguments& a, cudaStream_t stream) {
  static_assert(sizeof(Memory<FEW>) <= 232448, "shared memory of one block");
  const host::Launch how = {dim3(a.splits, a.batch), kThreads, sizeof(Memory<FEW>), stream, true, a.cluster};
  return host::launch(attend<FEW, SLABS>, how, query, cache, halves, a);
}

}  // namespace mla

// Returns 0, a cudaError_t, or 1000 and above for errors of our own.
extern "C" int kimi_mla_decode(const void* q, const void* cache, int64_t cache_rows, const mla::Arguments* args, int few,
                               int slabs, int wide, void* stream_ptr) {
  using namespace mla;
  const Arguments& a = *args;
  auto stream = static_cast<cudaStream_t>(stream_ptr);
  if (few && a.heads != 8) return 1002;
  const auto promotion = wide ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  CUtensorMap query_map, cache_map, halves_map = {};
  if (int rc = encode(&query_map, q, int64_t(a.batch) * a.heads, a.heads, 1, promotion)) return rc;
  if (int rc = encode(&cache_map, cache, cache_rows, kRows, 1, promotion)) return rc;
  if (slabs)
    if (int rc = encode(&halves_map, cache, cache_rows, 8, 4, promotion)) return rc;
  auto attend_as = few ? launch_attend<true, false> : launch_attend<false, false>;
  if (slabs) attend_as = few ? launch_attend<true, true> : launch_attend<false, true>;
  if (int rc = attend_as(query_map, cache_map, halves_map, a, stream)) return rc;
  Arguments joined = a;
  joined.splits = a.splits / a.cluster;
  if (joined.splits == 1) return 0;
  const int rows = a.batch * a.heads;
  if (joined.splits < 16) return host::launch(join<1>, {dim3(rows), kJoinThreads, 0, stream}, joined);
  return host::launch(join<4>, {dim3(rows, 4), kJoinThreads, 0, stream}, joined);
}
