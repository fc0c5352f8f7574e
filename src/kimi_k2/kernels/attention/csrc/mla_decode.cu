// Host side of MLA decode attention: tensor maps and launches behind one C function.
#include "common/csrc/launch.cuh"
#include "mla_attend.cuh"
#include "mla_merge_launch.cuh"

namespace mla {

static int encode(CUtensorMap* map, const void* base, int64_t rows, int box_rows) {
  return host::encode_rows(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, kRow, rows, box_rows);
}

template <PartsAs AS>
static int launch_join(const Arguments& a, cudaStream_t stream) {
  const int threads = a.batch * a.heads * (kLatent / Source<AS>::kValues);
  const auto on = [&](int groups) {
    return host::Launch{dim3(threads / kJoinThreads * groups), kJoinThreads, 0, stream};
  };
  if (a.splits <= 2) return host::launch(join<AS, 1, 2>, on(1), a);
  if (a.splits <= 8) return host::launch(join<AS, 1, 8>, on(1), a);
  return host::launch(join<AS, 8, 16>, on(8), a);
}

template <bool FP8_CACHE, int HEADS>
static int launch_few(const Arguments& a, const CUtensorMap& query, const CUtensorMap& cache, dim3 grid,
                      cudaStream_t stream) {
  static_assert(sizeof(FewMemory<HEADS, true>) <= host::kMaxShared, "a block does not have so much shared memory");
  const size_t bytes = a.plan ? sizeof(FewMemory<HEADS, true>) : sizeof(FewMemory<HEADS, false>);
  return host::launch(a.plan ? attend_few_planned<FP8_CACHE, HEADS> : attend_few<FP8_CACHE, HEADS>,
                      {grid, kFewThreads<FP8_CACHE, HEADS>, bytes, stream}, query, cache, a);
}

template <bool FP8_CACHE>
static int launch(const Arguments& a, const CUtensorMap& query, const CUtensorMap& cache, cudaStream_t stream) {
  static_assert(sizeof(Memory) <= host::kMaxShared, "a block does not have so much shared memory");
  const dim3 grid = a.plan ? dim3(a.blocks) : dim3(a.splits, a.batch);
  if (a.heads == 8) return launch_few<FP8_CACHE, 8>(a, query, cache, grid, stream);
  if (a.heads == 16) return launch_few<FP8_CACHE, 16>(a, query, cache, grid, stream);
  return host::launch(a.plan ? attend_planned<FP8_CACHE> : attend<FP8_CACHE>, {grid, kThreads, sizeof(Memory), stream},
                      query, cache, a);
}

}  // namespace mla

// A cache of e4m3 with `fp8_cache`, else of bfloat16. Without `joins`, args->parts and args->sums are the result.
// Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_mla_decode(const void* q, const mla::Arguments* args, int fp8_cache, int joins, void* stream_ptr) {
  using namespace mla;
  Arguments a = *args;
  if (fp8_cache) a.scale *= kQueryUnit;
  const auto stream = static_cast<cudaStream_t>(stream_ptr);
  CUtensorMap query, cache;
  if (int rc = encode(&query, q, int64_t(a.batch) * a.heads, a.heads)) return rc;
  cache = query;  // FP8 values do not come by it
  if (!fp8_cache)
    if (int rc = encode(&cache, a.cache, a.rows, kRows)) return rc;
  if (int rc = fp8_cache ? launch<true>(a, query, cache, stream) : launch<false>(a, query, cache, stream)) return rc;
  if (!joins || (a.plan && a.whole)) return 0;
  if (a.plan)
    return a.heads <= kMostFewHeads ? launch_merge_planned<kFloat32>(a, stream)
                                    : launch_merge_planned<kRegisters>(a, stream);
  if (a.splits == 1) return 0;
  return a.heads <= kMostFewHeads ? launch_join<kFloat32>(a, stream) : launch_join<kRegisters>(a, stream);
}
