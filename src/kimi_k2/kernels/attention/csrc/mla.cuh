// Shapes, arguments and shared memory of MLA decode attention.
#pragma once
#include "mla_plan.cuh"
#include "mla_wgmma.cuh"

namespace mla {

using namespace ptx;

constexpr int kLatent = 512, kRow = 576, kRows = 64, kBoxes = kRow / 64, kMostFewHeads = 16;
// A stage holds 64 rows of 64 columns after another: a box is the step from columns to the next, kEight from 8 rows to
// the next 8, a half four boxes.
constexpr int kBoxBytes = kRows * 128, kEight = 1024, kHalfBytes = 4 * kBoxBytes, kStageBytes = kBoxes * kBoxBytes;
// A stage arrives and is released in three groups of boxes: left half of the latent, right half, rotated key.
constexpr int kStages = 2, kGroups = 3;
// Two warpgroups compute; what comes behind them copies.
constexpr int kConsumers = 256;
// Over an e4m3 cache queries are divided by this, and scores multiplied (mla_fp8_cache.cuh).
constexpr float kQueryUnit = 64;

struct Arguments {
  const int* table;      // [batch, table_stride] pages, or null: contiguous
  const int* lengths;    // [batch]
  __nv_bfloat16* out;    // [batch, heads, 512]
  void* parts;           // normalised, one of `splits` after another; not used where that is one
  float* sums;           // base-2 logarithms of the parts' sums of exponentials
  const uint8_t* cache;  // [rows, 576] of bfloat16 or e4m3
  int64_t rows;
  int batch, heads, splits, table_stride, capacity;
  // Of neighbouring requests so many have the same length, and so many the same rows and pages; a request's heads are
  // those of so many tokens, one after another, each of which sees one row more than the one before.
  int share, row_share, tokens;
  float scale, value_scale;  // of the scores, times log2(e); of the values
  // Who takes which rows (mla_plan.cuh), or null: every context in `splits` parts. With a plan a part lies at its
  // item's number, `splits` and `share` are not used, and the launch has `blocks` blocks.
  const PlannedMerge* plan;
  int blocks, sm_count;
  int uniform;  // parts are merged in the same steps whatever the number of requests
  int whole;    // the plan cuts no context: no merge follows
  float* lse;   // [batch, heads], natural logarithms of the sums of exponentials, -inf without rows; or null
};

// `head` of all requests', its base-2 logarithm given.
__device__ __forceinline__ void store_lse(const Arguments& a, int64_t head, float log) {
  if (a.lse != nullptr) a.lse[head] = log * 0.693147180559945f;
}

// What a block works on: a part of a request's context, stored as part number `slot` of all. Without a plan that is
// part `split` of `a.splits`.
template <bool PLANNED>
struct Work {
  int split = blockIdx.x, request = blockIdx.y;
  __device__ __forceinline__ int64_t slot(const Arguments& a) const { return int64_t(request) * a.splits + split; }
  __device__ __forceinline__ bool alone(const Arguments& a) const { return !(a.splits > 1); }
};
template <>
struct Work<true> {
  int request, item;
  bool whole;
  __device__ __forceinline__ Work(int number, const PlannedItem& from)
      : request(from.request), item(number), whole(from.begin == 0 && from.end == units_of(from.length)) {}
  __device__ __forceinline__ int64_t slot(const Arguments&) const { return item; }
  // Without a result, parts alone are wanted.
  __device__ __forceinline__ bool alone(const Arguments& a) const { return whole && a.out != nullptr; }
};

// What the copies need: the queries in 9 boxes of 64 columns, the stages, and whether each has arrived or is free.
// Blocks that follow a plan take one item after another: queries may come while the ones before are in use.
template <int QUERY_BOX, int QUERIES, int READERS>
struct Stages {
  static constexpr int kQueryBox = QUERY_BOX, kQueries = QUERIES, kReaders = READERS;  // warps that read the queries
  uint8_t query[QUERIES][kBoxes * QUERY_BOX];
  uint8_t stage[kStages][kStageBytes];
  uint64_t query_full[QUERIES], query_empty[QUERIES], full[kStages][kGroups], empty[kStages][kGroups];
};

// 32 heads and more. The matrix instruction reads 64 rows of queries all the same: with 32 heads the others are
// whatever lies behind, and what becomes of them is dropped. Totals are of every other item.
struct alignas(1024) Memory : Stages<kBoxBytes, 1, 4> {
  alignas(16) uint32_t weights[128 * 16];
  float shrink[64], top[2][64], total[2][64];
};

// One warpgroup's half of its sums, on its way to the other one: of 8 heads 4 boxes of 16 bytes a thread.
template <int HEADS>
constexpr int kHandedValues = 4 * 128 * HEADS / 2;
template <int HEADS, bool PLANNED>
struct FewMemory;
// Handed over in the stages, into which nothing is copied any more.
template <int HEADS>
struct alignas(1024) FewMemory<HEADS, false> : Stages<HEADS * 128, 1, 8> {
  alignas(16) float peak[2][4][HEADS], total[1][2][4][HEADS], top[1][2][HEADS];
  __device__ __forceinline__ float4* handed(int, int role) { return reinterpret_cast<float4*>(this->stage[role]); }
};
// The next item's rows are on their way already; places of its own, of 8 heads of every other item. Of 16 heads there
// is room for one item's: both warpgroups meet before the next one.
template <int HEADS>
struct alignas(1024) FewMemory<HEADS, true> : Stages<HEADS * 128, 2, 8> {
  static constexpr int kHandedItems = HEADS == 8 ? 2 : 1;
  alignas(16) float peak[2][4][HEADS], total[2][2][4][HEADS], top[2][2][HEADS];
  alignas(16) float values[kHandedItems][2][kHandedValues<HEADS>];
  __device__ __forceinline__ float4* handed(int parity, int role) {
    return reinterpret_cast<float4*>(values[parity % kHandedItems][role]);
  }
};

}  // namespace mla
