// Shapes, arguments and shared memory of MLA decode attention.
#pragma once
#include "mla_plan.cuh"
#include "mla_wgmma.cuh"

namespace mla {

using namespace ptx;

constexpr int kLatent = 512, kRow = 576, kRows = 64, kBoxes = kRow / 64, kFewHeads = 8;
// A stage holds 64 rows of 64 columns after another: a box is the step from columns to the next, kEight from 8 rows to
// the next 8, a half four boxes.
constexpr int kBoxBytes = kRows * 128, kEight = 1024, kHalfBytes = 4 * kBoxBytes, kStageBytes = kBoxes * kBoxBytes;
// A stage arrives and is released in three groups of boxes: left half of the latent, right half, rotated key.
constexpr int kStages = 2, kGroups = 3;
// Two warpgroups compute; what comes behind them copies.
constexpr int kConsumers = 256;

struct Arguments {
  const int* table;      // [batch, table_stride] pages, or null: contiguous
  const int* lengths;    // [batch]
  __nv_bfloat16* out;    // [batch, heads, 512]
  void* parts;           // normalised, one of `splits` after another; not used where that is one
  float* sums;           // base-2 logarithms of the parts' sums of exponentials
  const uint8_t* cache;  // [rows, 576] of bfloat16 or e4m3
  int64_t rows;
  int batch, heads, splits, table_stride, capacity;
  int share;                 // requests with the same table, length and rows: so many times `heads` heads
  float scale, value_scale;  // of the scores, times log2(e); of the values
  // [batch] merges, then [slots] items, or null: every context in `splits` parts. With a plan a block's part lies at
  // the block's number, and `splits` and `share` are not used.
  const PlannedMerge* plan;
  int slots, sm_count;
};

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
  int request, parts;
  __device__ __forceinline__ int64_t slot(const Arguments&) const { return blockIdx.x; }
  __device__ __forceinline__ bool alone(const Arguments&) const { return parts == 1; }
};

// What the copies need: the queries in 9 boxes of 64 columns, the stages, and whether each has arrived or is free.
template <int QUERY_BOX>
struct Stages {
  static constexpr int kQueryBox = QUERY_BOX;
  uint8_t query[kBoxes * QUERY_BOX];
  uint8_t stage[kStages][kStageBytes];
  uint64_t query_full, full[kStages][kGroups], empty[kStages][kGroups];
};

// 16 heads and more. The matrix instruction reads 64 rows of queries all the same: with 16 and 32 heads the others are
// whatever lies behind, and what becomes of them is dropped.
struct alignas(1024) Memory : Stages<kBoxBytes> {
  alignas(16) uint32_t weights[128 * 16];
  float shrink[64], top[64], total[64];
};

struct alignas(1024) FewMemory : Stages<kFewHeads * 128> {
  alignas(16) float peak[2][4][kFewHeads], total[2][4][kFewHeads], top[2][kFewHeads];  // of a warpgroup's warps
};

}  // namespace mla
