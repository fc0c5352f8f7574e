// How MLA decode attention's work is shared out where lengths differ: the layout of a plan, which mla_plan.cu makes on
// the device and mla_decode.cu's kernels follow.
#pragma once
#include <cstdint>

namespace mla {

constexpr int kPlanRows = 64;    // cache rows of a unit of work
constexpr int kMostParts = 128;  // of one request
constexpr int kMostRequests = 1024;

// A plan is [batch] merges, then [slots] items: 16 bytes each. A block takes the item of its own number, longest first.
// A request's items follow each other; where it has one, that item writes the result itself, else a merge does.
struct PlannedMerge {
  int request, first, parts;  // items `first` on; -1, 0, 0 past the last merge
  int counts;                 // the same in every merge: see merges_of
};
struct PlannedItem {
  int request;  // -1: there is nothing to do
  int part, parts;
  int length;  // of the request's context
};

// Requests with many parts come first, then some, then few or none: so many groups of threads share a merge.
__host__ __device__ constexpr int merge_groups(int which) { return which == 0 ? 8 : which == 1 ? 4 : 1; }
__device__ __forceinline__ int merge_class(int parts) { return parts > 16 ? 0 : parts > 4 ? 1 : 2; }
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
