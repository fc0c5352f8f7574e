// Shapes, arguments and shared memory of MLA decode attention.
#pragma once
#include "mla_ptx.cuh"

namespace mla {

using moe::mbar_wait;
using moe::smem_u32;

constexpr int kLatent = 512, kRow = 576, kRows = 64, kBoxes = kRow / 64;
constexpr int kBoxBytes = kRows * 128, kStageBytes = kBoxes * kBoxBytes;
// Three warpgroups, the third to copy: registers are handed from it to the other two.
constexpr int kConsumers = 256, kThreads = kConsumers + 128, kConsumerRegisters = 240, kCopierRegisters = 24;
// A stage arrives and is released in three groups of boxes: left half of the latent, right half, rotated key.
constexpr int kGroups = 3;
// Named barriers: weights written, weights read, totals written, one warpgroup alone (4 and 5).
constexpr int kReady = 1, kFree = 2, kTotals = 3, kAlone = 4;

struct Arguments {
  const int* table;    // [batch, table_stride] pages, or null: contiguous
  const int* lengths;  // [batch]
  __nv_bfloat16* out;  // [batch, heads, 512]
  float* parts;        // [batch, heads, splits / cluster, 512], normalised; not used where that is one
  float* sums;         // [batch, heads, splits / cluster], base-2 logarithms of the sums of exponentials
  int batch, heads, splits, table_stride, capacity, cluster;
  float scale;  // of the scores, times log2(e)
};

// A stage holds 64 rows of 64 columns after another: a box is the step from columns to the next, kEight from 8 rows to the
// next 8, a half four boxes.
constexpr int kEight = 1024, kHalfBytes = 4 * kBoxBytes;

// FEW: 8 heads. The matrix instruction reads 64 rows of queries all the same: the other 56 are whatever lies behind the
// eight (more queries, cache rows), and what becomes of them is dropped. So with 16 and 32 heads.
template <bool FEW>
struct Shape {
  static constexpr int kStages = FEW ? 3 : 2;
  static constexpr int kQueryBox = FEW ? 1024 : kBoxBytes;  // bytes of 64 columns of the queries
  static constexpr int kWeights = FEW ? 32 * 8 : 128 * 16;  // words of the weights passed to the second warpgroup
};

template <bool FEW>
struct alignas(1024) Memory {
  using S = Shape<FEW>;
  uint8_t query[kBoxes * S::kQueryBox];
  uint8_t stage[S::kStages][kStageBytes];
  uint32_t weights[S::kWeights];
  float shrink[64], top[64], total[64];
  uint64_t query_full, full[S::kStages][kGroups], empty[S::kStages][kGroups];
};

}  // namespace mla
