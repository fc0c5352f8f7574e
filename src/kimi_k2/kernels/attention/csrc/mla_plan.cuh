// How MLA decode attention's work is shared out where lengths differ: the layout of a plan, which mla_plan.cu makes on
// the device and mla_decode.cu's kernels follow.
#pragma once
#include <cstdint>

namespace mla {

constexpr int kPlanRows = 64;    // cache rows of a unit of work
constexpr int kMostParts = 128;  // of one request
constexpr int kMostRequests = 1024;

// A plan is [batch] requests, then [slots] items: 16 bytes each. A block takes the item of its own number, longest
// first. A request's items follow each other; where it has one, that item writes the result itself.
struct PlannedRequest {
  int first, parts, unused[2];
};
struct PlannedItem {
  int request;  // -1: there is nothing to do
  int part, parts;
  int length;  // of the request's context
};

// Units of a context, and where part `part` of `parts` begins among them.
__device__ __forceinline__ int units_of(int length) { return length > 0 ? (length + kPlanRows - 1) / kPlanRows : 0; }
__device__ __forceinline__ int begin_of(int units, int part, int parts) { return int(int64_t(units) * part / parts); }

}  // namespace mla
