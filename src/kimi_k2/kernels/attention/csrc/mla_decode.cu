// Host side of MLA decode attention: tensor maps and launches behind one C function.
#include "common/csrc/launch.cuh"
#include "mla_attend.cuh"

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

template <bool HALVES>
static int launch_join(const Arguments& a, cudaStream_t stream) {
  const int threads = a.batch * a.heads * (kLatent / Source<HALVES>::kValues);
  const auto on = [&](int groups) { return host::Launch{dim3(threads / kJoinThreads * groups), kJoinThreads, 0, stream}; };
  if (a.splits <= 2) return host::launch(join<HALVES, 1, 2>, on(1), a);
  if (a.splits <= 8) return host::launch(join<HALVES, 1, 8>, on(1), a);
  return host::launch(join<HALVES, 8, 16>, on(8), a);
}

template <bool CODES>
static int launch(const Arguments& a, const CUtensorMap& query, const CUtensorMap& cache, cudaStream_t stream) {
  static_assert(sizeof(Memory) <= 232448, "shared memory of one block");
  const dim3 blocks(a.splits, a.batch);
  if (a.heads == kFewHeads)
    return host::launch(attend_few<CODES>, {blocks, kFewThreads<CODES>, sizeof(FewMemory), stream}, query, cache, a);
  return host::launch(attend<CODES>, {blocks, kThreads, sizeof(Memory), stream}, query, cache, a);
}

}  // namespace mla

// A cache of e4m3 with `codes`, else of bfloat16. Without `joins`, args->parts and args->sums are the result. Returns 0, a
// cudaError_t, or 1000 and above for errors of our own.
extern "C" int kimi_mla_decode(const void* q, const mla::Arguments* args, int codes, int joins, void* stream_ptr) {
  using namespace mla;
  const Arguments& a = *args;
  const auto stream = static_cast<cudaStream_t>(stream_ptr);
  CUtensorMap query, cache;
  if (int rc = encode(&query, q, int64_t(a.batch) * a.heads, a.heads)) return rc;
  cache = query;  // codes do not come by it
  if (!codes)
    if (int rc = encode(&cache, a.cache, a.rows, kRows)) return rc;
  if (int rc = codes ? launch<true>(a, query, cache, stream) : launch<false>(a, query, cache, stream)) return rc;
  if (a.splits == 1 || !joins) return 0;
  return a.heads == kFewHeads ? launch_join<false>(a, stream) : launch_join<true>(a, stream);
}
