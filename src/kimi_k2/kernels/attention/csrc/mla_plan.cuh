// How MLA decode attention's work is shared out where lengths differ: the layout of a plan, which mla_plan.cu makes on
// the device and mla_decode.cu's kernels follow.
#pragma once
#include <cstdint>

namespace mla {

constexpr int kPlanRows = 64;    // cache rows of a unit of work
constexpr int kMostParts = 128;  // of one request
constexpr int kMostRequests = 1024;
constexpr int kMostBlocks = 255;

// A plan is rows of 16 bytes: [batch] merges, [batch] requests, the number of every block's first item and behind the
// last block's the number of all items, four a row, then the items, of which mla_plan.cu makes up to batch + blocks. A
// block takes its items one after another. A request's items follow each other; where it has one, that item writes the
// result itself, else a merge does.
struct PlannedMerge {
  int request, first, parts;  // items `first` on; -1, 0, 0 past the last merge
  int counts;                 // the same in every merge: see merges_of
};
struct PlannedRequest {
  int first, parts;  // items; 0 for an empty context
  int unused[2];
};
struct PlannedItem {
  int request;
  int begin, end;  // units of its context
  int length;      // of the whole context, in rows
};
static_assert(sizeof(PlannedMerge) == 16 && sizeof(PlannedRequest) == 16 && sizeof(PlannedItem) == 16, "a row");

template <class Row>
__host__ __device__ constexpr Row* requests_of(Row* plan, int batch) {
  return plan + batch;
}
template <class Row>
__host__ __device__ constexpr Row* first_items_of(Row* plan, int batch) {
  return plan + 2 * batch;
}
template <class Row>
__host__ __device__ constexpr Row* items_of(Row* plan, int batch, int blocks) {
  return plan + 2 * batch + blocks / 4 + 1;
}

// Requests with many parts come first, then some, then few or none: so many groups of threads share a merge. With 8
// heads a merge has few columns, so that several groups share one of fewer parts.
__host__ __device__ constexpr int merge_groups(int which) { return which == 0 ? 8 : which == 1 ? 4 : 1; }
__device__ __forceinline__ int merge_class(int parts, int some) { return parts > 32 ? 0 : parts >= some ? 1 : 2; }
constexpr int kUniformTogether =
    4;                          // parts in flight, and so the order of the sums, where requests are many or uniform
constexpr int kCountBits = 10;  // of the first two classes; of the third more
__device__ __forceinline__ int merges_of(int counts, int which) {
  return which == 2 ? counts >> 2 * kCountBits : counts >> which * kCountBits & ((1 << kCountBits) - 1);
}

// Units of a context, and where part `part` of `parts` begins among them.
__device__ __forceinline__ int units_of(int length) { return length > 0 ? (length + kPlanRows - 1) / kPlanRows : 0; }
// units * part / parts, in 32 bits.
__device__ __forceinline__ int begin_of(int units, int part, int parts) {
  const unsigned whole = unsigned(units) / unsigned(parts), rest = unsigned(units) % unsigned(parts);
  return int(whole * part + rest * part / unsigned(parts));
}

}  // namespace mla
