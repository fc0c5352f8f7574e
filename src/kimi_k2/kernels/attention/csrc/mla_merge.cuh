// Joins the parts of a context, weighed by their sums of exponentials, in a fixed order.
#pragma once
#include "mla_store.cuh"

namespace mla {

constexpr int kJoinThreads = 256;

// How parts lie: rows of float32 for 8 and 16 heads; as `store_part` leaves them; rows of float16 [part, heads, 512].
enum PartsAs { kFloat32, kRegisters, kFloat16 };

// Where a thread's columns of the parts and their sums are; `step` from one part to the next.
template <PartsAs AS>
struct Source;

// As `store_part` leaves them: eight columns a thread.
template <>
struct Source<kRegisters> {
  static constexpr int kValues = 8;
  int64_t row;  // of the result
  int column, part_step, sums_step;
  const uint4* part;
  const float2* sums;
  __device__ Source(const Arguments& a, uint32_t thread) {
    part_step = a.heads * 64, sums_step = a.heads * 2;
    const int request = thread / part_step, within = thread % part_step;
    const Slot slot(within, a.heads);
    row = int64_t(request) * a.heads + slot.head, column = slot.column;
    part = static_cast<const uint4*>(a.parts) + int64_t(request) * a.splits * part_step + within;
    sums = reinterpret_cast<const float2*>(a.sums) + int64_t(request) * a.splits * sums_step + slot.half * a.heads +
           slot.head;
  }
  __device__ float2 sum_of(int split) const { return __ldcg(sums + int64_t(split) * sums_step); }
  __device__ static void unpack(float (&values)[8], const uint4& from) {
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&words[j]));
      values[2 * j] = two.x, values[2 * j + 1] = two.y;
    }
  }
  __device__ static void write(__nv_bfloat16* out, const float (&values)[8]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) *reinterpret_cast<uint32_t*>(out + j * 8) = pack_bf16(values[2 * j], values[2 * j + 1]);
  }
};

// Rows of float32 for 8 and 16 heads, all parts of a head after another: four columns a thread.
template <>
struct Source<kFloat32> {
  static constexpr int kValues = 4;
  int64_t row;
  int column;
  static constexpr int part_step = kLatent / 4;
  const uint4* part;
  const float* sums;
  __device__ Source(const Arguments& a, uint32_t thread) {
    row = thread / part_step, column = thread % part_step * 4;
    part = static_cast<const uint4*>(a.parts) + row * a.splits * part_step + thread % part_step;
    sums = a.sums + row * a.splits;
  }
  __device__ float2 sum_of(int split) const { return make_float2(__ldcg(sums + split), 1.f); }
  __device__ static void unpack(float (&values)[4], const uint4& from) {
    values[0] = __uint_as_float(from.x), values[1] = __uint_as_float(from.y);
    values[2] = __uint_as_float(from.z), values[3] = __uint_as_float(from.w);
  }
  __device__ static void write(__nv_bfloat16* out, const float (&values)[4]) {
    *reinterpret_cast<uint2*>(out) = make_uint2(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]));
  }
};

// Where they lie is `PlannedSource`'s to say: eight columns a thread.
template <>
struct Source<kFloat16> {
  static constexpr int kValues = 8;
  __device__ static void unpack(float (&values)[8], const uint4& from) { Source<kRegisters>::unpack(values, from); }
  __device__ static void write(__nv_bfloat16* out, const float (&values)[8]) {
    *reinterpret_cast<uint4*>(out) = make_uint4(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                                                pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7]));
  }
};

// CHUNKS groups of threads take every CHUNKS-th part, at most PARTS each, every load before its first use; then the
// first group adds up.
template <PartsAs AS, int CHUNKS, int PARTS>
__global__ void __launch_bounds__(kJoinThreads) join(const Arguments a) {
  constexpr int kLanes = kJoinThreads / CHUNKS, kValues = Source<AS>::kValues, kOthers = CHUNKS > 1 ? CHUNKS - 1 : 1;
  __shared__ float others[kOthers][kValues + 2][kLanes];
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Source<AS> source(a, blockIdx.x * kLanes + lane);
  pdl_wait();
  pdl_launch();
  float2 log[PARTS];
  uint4 part[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const int split = i * CHUNKS + group;
    log[i] = make_float2(-INFINITY, 0.f);
    if (split < a.splits) {
      log[i] = source.sum_of(split);
      // A part that was not written is read, so that no load waits for another, and then dropped.
      part[i] = __ldcg(source.part + int64_t(split) * source.part_step);
    }
  }
  float top = -INFINITY, total = 0, sum[kValues] = {};
#pragma unroll
  for (int i = 0; i < PARTS; ++i) top = fmaxf(top, log[i].x);
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    if (log[i].x == -INFINITY) continue;
    const float share = exp2_approximate(log[i].x - top), weight = share * log[i].y;
    float values[kValues];
    Source<AS>::unpack(values, part[i]);
    total += share;
#pragma unroll
    for (int j = 0; j < kValues; ++j) sum[j] += values[j] * weight;
  }
  if (CHUNKS > 1) {
    if (group > 0) {
#pragma unroll
      for (int j = 0; j < kValues; ++j) others[group - 1][j][lane] = sum[j];
      others[group - 1][kValues][lane] = top, others[group - 1][kValues + 1][lane] = total;
    }
    __syncthreads();
    if (group > 0) return;
    float best = top;
#pragma unroll
    for (int one = 0; one < kOthers; ++one) best = fmaxf(best, others[one][kValues][lane]);
    const float own = top == -INFINITY ? 0.f : exp2_approximate(top - best);
    top = best, total *= own;
#pragma unroll
    for (int j = 0; j < kValues; ++j) sum[j] *= own;
#pragma unroll
    for (int one = 0; one < kOthers; ++one) {
      const float theirs = others[one][kValues][lane],
                  share = theirs == -INFINITY ? 0.f : exp2_approximate(theirs - best);
      total += share * others[one][kValues + 1][lane];
#pragma unroll
      for (int j = 0; j < kValues; ++j) sum[j] += share * others[one][j][lane];
    }
  }
  if (source.column == 0) store_lse(a, source.row, top + log2f(total));
  // A context of length zero: every part is empty and the result is zero.
  const float inverse = total > 0 ? 1.f / total : 0.f;
#pragma unroll
  for (int j = 0; j < kValues; ++j) sum[j] *= inverse;
  Source<AS>::write(a.out + source.row * kLatent + source.column, sum);
}

}  // namespace mla
