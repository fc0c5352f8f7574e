// Host side of every kernel: the launch, and the driver's encoder of tensor maps.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "errors.cuh"

namespace host {

// Dynamic shared memory that a block may have on sm_90.
constexpr size_t kMaxShared = 227 * 1024;
static_assert(kMaxShared == 232448, "227 KiB: CUDA's limit a block on compute capability 9.0");

// Share of an SM's memory, in percent, that the launches of a decode step have it keep for their blocks, the
// rest being L1 for loads in flight. Launches that ask for different shares do not overlap: the SM runs
// empty before it is divided anew, which cost a layer 4 of 45 us. MLA's own launches and GEMMs of 5 to 8 tokens of
// 4096 columns or more need more than this share and still do so.
constexpr int kDecodeShare = 58;
// Of launches whose blocks hold their weights in shared memory.
constexpr int kWholeShare = 100;

struct Launch {
  dim3 grid;
  int threads;
  size_t shared;  // dynamic shared memory in bytes
  cudaStream_t stream;
  bool overlap = true;  // may begin before the kernel before it in the stream has ended
  int cluster = 1;      // blocks of a cluster, along x
  int share = cudaSharedmemCarveoutDefault;
};

template <class... Parameters, class... Arguments>
inline int launch(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
  if (how.shared > 48 * 1024)
    if (int rc = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(how.shared))) return rc;
  if (how.share != cudaSharedmemCarveoutDefault)
    if (int rc = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, how.share)) return rc;
  cudaLaunchConfig_t config = {};
  config.gridDim = how.grid;
  config.blockDim = dim3(how.threads);
  config.dynamicSmemBytes = how.shared;
  config.stream = how.stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (how.overlap) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (how.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(how.cluster), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

using EncodeFn = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's cuTensorMapEncodeTiled, found at run time so that nothing links against the driver; null without it.
inline EncodeFn tensor_map_encoder() {
  static const EncodeFn found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<EncodeFn>(entry);
  }();
  return found;
}

// Tensor map of a row-major matrix, in boxes of `box_rows` rows by `box_columns`, row after row unless swizzled; what
// lies past the end arrives as zeros. Returns 0 or an Error.
inline int encode_box(CUtensorMap* map, CUtensorMapDataType type, int value_bytes, const void* base, uint64_t columns,
                      uint64_t rows, int box_columns, int box_rows,
                      CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE) {
  const auto encode_tiled = tensor_map_encoder();
  if (!encode_tiled) return kNoEncoder;
  const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * value_bytes};
  const cuuint32_t box[2] = {cuuint32_t(box_columns), cuuint32_t(box_rows)}, step[2] = {1, 1};
  return encode_tiled(map, type, 2, const_cast<void*>(base), sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
             ? kNotEncoded
             : 0;
}

// The same in boxes of rows of 128 bytes with 128-byte swizzle.
inline int encode_rows(CUtensorMap* map, CUtensorMapDataType type, int value_bytes, const void* base, uint64_t columns,
                       uint64_t rows, int box_rows) {
  return encode_box(map, type, value_bytes, base, columns, rows, 128 / value_bytes, box_rows,
                    CU_TENSOR_MAP_SWIZZLE_128B);
}

// The same of bytes, in boxes of `box_blocks` blocks of 128 columns by `box_rows` rows: row after row, of each its
// blocks, 128 bytes each.
inline int encode_blocks(CUtensorMap* map, const void* base, uint64_t columns, uint64_t rows, int box_blocks,
                         int box_rows) {
  const auto encode_tiled = tensor_map_encoder();
  if (!encode_tiled) return kNoEncoder;
  const cuuint64_t sizes[3] = {128, columns / 128, rows}, strides[2] = {128, columns};
  const cuuint32_t box[3] = {128, cuuint32_t(box_blocks), cuuint32_t(box_rows)}, step[3] = {1, 1, 1};
  return encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), sizes, strides, box, step,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
             ? kNotEncoded
             : 0;
}

// Tensor map of a row-major bf16 matrix as `parts` parts of its columns, in boxes of `box_rows` rows by 64 columns of
// every part: part after part, with 128-byte swizzle.
inline int encode_parts(CUtensorMap* map, const void* base, uint64_t rows, uint64_t columns, int parts, int box_rows) {
  const auto encode_tiled = tensor_map_encoder();
  if (!encode_tiled) return kNoEncoder;
  const cuuint64_t sizes[4] = {64, rows, columns / 64 / parts, cuuint64_t(parts)};
  const cuuint64_t strides[3] = {columns * 2, 128, columns / parts * 2};
  const cuuint32_t box[4] = {64, cuuint32_t(box_rows), 1, cuuint32_t(parts)}, step[4] = {1, 1, 1, 1};
  return encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(base), sizes, strides, box, step,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
             ? kNotEncoded
             : 0;
}

}  // namespace host
