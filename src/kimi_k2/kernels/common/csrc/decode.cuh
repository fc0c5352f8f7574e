// What the kernels for a few tokens share: each weight is read once, 16 bytes a lane and load, and the launches
// overlap: a kernel asks for its weights before it waits for the one before it. To one whose blocks start late that
// wait costs a microsecond, so they may start once this one's inputs have arrived, or earlier where few blocks run.
// Where the next one reads, before its own wait, what the launch before this one wrote, it may only start after this
// one's wait.
#pragma once
#include "decode_ptx.cuh"
#include "errors.cuh"

namespace decode {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// 8 bf16 to float32.
__device__ __forceinline__ void widen(const uint4 raw, float* to) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) to[2 * i] = low(words[i]), to[2 * i + 1] = high(words[i]);
}

// Sum of 16 e4m3 values times 16 float32 values.
__device__ __forceinline__ float dot16(const uint4 fp8, const float (&x)[16]) {
  const uint32_t words[4] = {fp8.x, fp8.y, fp8.z, fp8.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 w = fp8x2_to_float2((words[i / 2] >> (i % 2 * 16)) & 0xffff);
    sum += w.x * x[2 * i];
    sum += w.y * x[2 * i + 1];
  }
  return sum;
}

template <int LANES = 32>
__device__ __forceinline__ float sum_lanes(float value) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(kAll, value, mask);
  return value;
}

// A token in shared memory: the first 8 of every 16 values, then the others, so that a warp's reads meet no bank twice.
// `v` counts groups of 8 values, `columns` all values.
__device__ __forceinline__ int place_of(int v, int columns) { return (v & 1) * (columns / 16) + (v >> 1); }

__device__ __forceinline__ void take16(const uint4* token, int columns, int chunk, float (&x)[16]) {
  widen(token[chunk], x);
  widen(token[columns / 16 + chunk], x + 8);
}

// The block's threads take `count` groups of 16 bytes, BATCH a thread at a time, all of a batch's loads before the
// first `put(index, value)`.
template <int BATCH, class Put>
__device__ __forceinline__ void take_groups(const uint4* from, int count, Put put) {
  for (int first = threadIdx.x; first < count; first += BATCH * kThreads) {
    uint4 value[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i * kThreads < count) value[i] = __ldcg(from + first + i * kThreads);
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i * kThreads < count) put(first + i * kThreads, value[i]);
  }
}

}  // namespace decode
