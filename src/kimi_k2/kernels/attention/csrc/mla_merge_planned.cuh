// Merges the parts of every context that a plan cut, in a fixed order. Few blocks take piece after piece of the plan's
// merges: a grid for all requests would mostly be blocks without work.
#pragma once
#include "mla_gather.cuh"
#include "mla_merge.cuh"

namespace mla {

// Parts of a group of threads in flight together, and blocks an SM: with many contexts most are of few parts.
struct FewMerges {
  static constexpr int kTogether = 8, kBlocks = 3;
};
struct ManyMerges {
  static constexpr int kTogether = kUniformTogether, kBlocks = 4;
};

// Where a thread's columns of a request's parts lie, the first part's number given; `*_step` from one part to the next.
template <PartsAs AS>
struct PlannedSource {
  static constexpr int kValues = Source<AS>::kValues;
  int64_t row, part, sum;  // of the result; in 16 bytes; single values of kFloat32, else in pairs
  int column, part_step, sum_step;
  __device__ PlannedSource(const Arguments& a, int request, int within, int first) {
    part_step = a.heads * (kLatent / kValues);
    part = int64_t(first) * part_step + within;
    int head;
    if constexpr (AS == kFloat16) {
      head = within / (kLatent / kValues), column = within % (kLatent / kValues) * kValues, sum_step = a.heads;
      sum = int64_t(first) * sum_step + head;
    } else if constexpr (AS == kRegisters) {
      const Slot slot(within, a.heads);
      head = slot.head, column = slot.column, sum_step = a.heads * 2;
      sum = int64_t(first) * sum_step + slot.half * a.heads + head;
    } else {
      head = within / (kLatent / kValues), column = within % (kLatent / kValues) * kValues, sum_step = a.heads;
      sum = int64_t(first) * sum_step + head;
    }
    row = int64_t(request) * a.heads + head;
  }
  // Base-2 logarithm of a part's sum of exponentials, and the power of two that its values lack.
  __device__ float2 sum_of(const Arguments& a, int split) const {
    const int64_t at = sum + int64_t(split) * sum_step;
    if constexpr (AS != kFloat32) return __ldcg(reinterpret_cast<const float2*>(a.sums) + at);
    else return make_float2(__ldcg(a.sums + at), 1.f);
  }
  __device__ uint4 part_of(const Arguments& a, int split) const {
    return __ldcg(static_cast<const uint4*>(a.parts) + part + int64_t(split) * part_step);
  }
};

// What the first group of threads needs of another one.
template <PartsAs AS>
using MergeShared = float[merge_groups(0) - 1][Source<AS>::kValues + 2][kJoinThreads / merge_groups(1)];

// One piece of a request's columns: GROUPS groups of threads take every GROUPS-th part; then the first group adds up.
template <PartsAs AS, int kMergedTogether, int GROUPS>
__device__ __forceinline__ void merge_piece(const Arguments& a, const PlannedMerge& merge, int piece,
                                            MergeShared<AS>& others) {
  constexpr int kLanes = kJoinThreads / GROUPS, kValues = Source<AS>::kValues;
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, parts = merge.parts;
  const PlannedSource<AS> source(a, merge.request, piece * kLanes + lane, merge.first);
  Gathered<kValues> joined;
  joined.template take<GROUPS, kMergedTogether>(
      group, parts, [&](int split) { return source.sum_of(a, split); },
      [&](int split) { return source.part_of(a, split); }, Source<AS>::unpack);
  if constexpr (GROUPS > 1) {
    if (group > 0) joined.leave(others, group, lane);
    __syncthreads();
    if (group == 0) joined.template add<GROUPS>(others, lane);
    __syncthreads();  // before the next piece
    if (group > 0) return;
  }
  if (source.column == 0) store_lse(a, source.row, joined.top + log2f(joined.total));
  joined.divide();
  Source<AS>::write(a.out + source.row * kLatent + source.column, joined.sum);
}

// What a block's piece number `i` is: the class of its request, the request's parts, the piece of its columns.
struct Piece {
  int which, within;
  PlannedMerge merge;
};

// A request's columns are `pieces` pieces for one group of threads a block, GROUPS times as many for GROUPS. The plan
// is there before attention starts, and so before this launch does.
template <PartsAs AS, class How>
__global__ void __launch_bounds__(kJoinThreads, How::kBlocks) merge_planned(const Arguments a) {
  static_assert(8 * kLatent / 4 % kJoinThreads == 0, "a piece belongs to one request");
  __shared__ MergeShared<AS> others;
  const int pieces = a.heads * (kLatent / Source<AS>::kValues) / kJoinThreads;
  const int counts = __ldcg(&a.plan->counts), many = merges_of(counts, 0), some = merges_of(counts, 1);
  const int of_many = pieces * merge_groups(0), of_some = pieces * merge_groups(1), of_few = pieces * merge_groups(2);
  const int end_many = many * of_many, end_some = end_many + some * of_some;
  const int end = end_some + merges_of(counts, 2) * of_few;
  const auto piece_of = [&](int i) {
    const int which = i < end_many ? 0 : i < end_some ? 1 : 2;
    const int within = i - (which == 0 ? 0 : which == 1 ? end_many : end_some);
    const int each = which == 0 ? of_many : which == 1 ? of_some : of_few;
    const int before = which == 0 ? 0 : which == 1 ? many : many + some;
    const int4 found = __ldcg(reinterpret_cast<const int4*>(a.plan) + before + within / each);
    return Piece{which, within % each, {found.x, found.y, found.z, found.w}};
  };
  int i = blockIdx.x;
  Piece piece = {};
  if (i < end) piece = piece_of(i);
  pdl_wait();
  pdl_launch();
  while (i < end) {
    if (piece.which == 0) merge_piece<AS, How::kTogether, merge_groups(0)>(a, piece.merge, piece.within, others);
    else if (piece.which == 1) merge_piece<AS, How::kTogether, merge_groups(1)>(a, piece.merge, piece.within, others);
    else merge_piece<AS, How::kTogether, merge_groups(2)>(a, piece.merge, piece.within, others);
    i += gridDim.x;
    if (i < end) piece = piece_of(i);
  }
}

}  // namespace mla
