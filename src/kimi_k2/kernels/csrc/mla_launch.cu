// Host side of MLA decode attention: tensor maps and launches behind one C function.
#include "mla_decode.cu"

namespace mla {

using EncodeFn = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                              const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static EncodeFn encoder() {
  static EncodeFn found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<EncodeFn>(entry);
  }();
  return found;
}

// Rows of 576 bfloat16 in boxes of `box_rows` rows of `groups` x 64 columns; rows past the tensor's end arrive as zeros.
static int encode(CUtensorMap* map, const void* base, int64_t rows, int box_rows, int groups,
                  CUtensorMapL2promotion promotion) {
  if (!encoder()) return 1000;
  const int dimensions = groups > 1 ? 3 : 2;
  const cuuint64_t sizes[3] = {groups > 1 ? 64u : kRow, cuuint64_t(rows), kBoxes}, strides[2] = {kRow * 2, 128};
  const cuuint32_t box[3] = {64, cuuint32_t(box_rows), cuuint32_t(groups)}, step[3] = {1, 1, 1};
  return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dimensions, const_cast<void*>(base), sizes, strides, box, step,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
             ? 1001
             : 0;
}

template <class... P, class... A>
static int launch(void (*kernel)(P...), dim3 grid, int threads, size_t shared, int cluster, cudaStream_t stream,
                  const A&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <bool FEW, bool SLABS>
static int launch_attend(const CUtensorMap& query, const CUtensorMap& cache, const CUtensorMap& halves,
                         const Arguments& a, cudaStream_t stream) {
  static_assert(sizeof(Memory<FEW>) <= 232448, "shared memory of one block");
  auto kernel = attend<FEW, SLABS>;
  if (int rc = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory<FEW>))) return rc;
  return launch(kernel, dim3(a.splits, a.batch), kThreads, sizeof(Memory<FEW>), a.cluster, stream, query, cache, halves, a);
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
  if (joined.splits < 16) return launch(join<1>, dim3(rows), kJoinThreads, 0, 1, stream, joined);
  return launch(join<4>, dim3(rows, 4), kJoinThreads, 0, 1, stream, joined);
}
