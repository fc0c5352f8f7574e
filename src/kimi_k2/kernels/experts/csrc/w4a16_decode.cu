// INT4 experts for a few tokens, one token-expert pair at a time, in two launches: 8 gate rows and their 8 up rows a
// block, whose warps share out the hidden dimension; then 16 output rows a block, whose warps share out the token's
// experts. Weights go from memory straight into the fragments of mma.m16n8k16 (the layout of w4a16.cuh), of whose 8
// token columns one is used. The second launch asks for its weights while the first still runs. Every sum has a fixed
// order.
#include "routing.cuh"
#include "w4a16_multiply.cuh"

namespace w4a16 {

using decode::kThreads;
using decode::kWarps;

struct DecodeArguments {
  const __nv_bfloat16* x;     // [tokens, hidden]
  const void* topk_indices;   // int64 or int32 [tokens, top_k]; < 0: invalid
  const float* topk_weights;  // [tokens, top_k]; 0: skipped
  const int* expert_map;      // [num_global] to the local expert or -1; may be null
  const uint4* gate_up;       // in chunks, see w4a16.cuh
  const uint4* gate_up_scale;
  const uint4* down;  // int4, or bf16 if down_scale is null
  const uint4* down_scale;
  __nv_bfloat16* intermediate;  // [tokens, top_k, inter]
  __nv_bfloat16* out;           // [tokens, hidden]
  int tokens, top_k, experts, num_global, hidden, inter, ids64;
};

// Where a lane's part of 16 rows lies: unit `rows16` of 16 rows, in matrices of `chunks` column chunks. A chunk further
// is kChunkWords and kChunkScales further.
constexpr int kChunkWords = kChunkBytes / 16, kChunkScales = kScaleBytes / 4;
__device__ __forceinline__ const uint4* words_of(const uint4* matrices, int64_t expert, int matrix_rows, int chunks,
                                                 int rows16, int chunk, int lane) {
  return matrices + ((expert * (matrix_rows / 256) + rows16 / 16) * chunks + chunk) * kChunkWords +
         rows16 % 16 / 4 * 256 + rows16 % 4 * 32 + lane;
}
// Rows lane / 4 and 8 further, of the group of 32 columns that is lane % 4 of a chunk.
__device__ __forceinline__ const uint32_t* scales_of(const void* matrices, int64_t expert, int matrix_rows, int chunks,
                                                     int rows16, int chunk, int lane) {
  return static_cast<const uint32_t*>(matrices) +
         ((expert * (matrix_rows / 256) + rows16 / 16) * chunks + chunk) * kChunkScales + rows16 % 16 * 32 + lane;
}

// A token in shared memory: the values that thread q of four wants for two steps (32 columns) are next to each other.
// `v` counts groups of 8 values.
__device__ __forceinline__ void put8(uint32_t* token, uint32_t v, const uint4 values) {
  uint32_t* at = token + v / 4 * 16 + v % 4;
  at[0] = values.x, at[4] = values.y, at[8] = values.z, at[12] = values.w;
}
// All eight columns get the token, though one would do: lanes then read the same words, without a branch.
__device__ __forceinline__ uint4 take_steps(const uint32_t* token, int column, int lane) {
  return *reinterpret_cast<const uint4*>(token + column / 2 + 4 * (lane & 3));
}

// acc += 16 rows by 128 columns; even and odd steps apart, so that MMAs wait less for each other.
__device__ __forceinline__ void multiply_chunk(float (&acc)[2][4], const uint4 (&word)[2], uint32_t scale,
                                               const uint32_t* token, int column, int lane) {
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const uint4 x = take_steps(token, column + group * 32, lane), four = word[group >> 1];
    const uint32_t pair = __shfl_sync(decode::kAll, scale, group, 4);
    const Unpack unpack(*reinterpret_cast<const __nv_bfloat162*>(&pair));
    uint32_t a[4];
    unpack(a, group & 1 ? four.z : four.x);
    mma_bf16(acc[0], a[0], a[1], a[2], a[3], x.x, x.y);
    unpack(a, group & 1 ? four.w : four.y);
    mma_bf16(acc[1], a[0], a[1], a[2], a[3], x.z, x.w);
  }
}

// PER_WARP chunks of 128 columns a warp, AHEAD of them in flight. Four blocks of an SM, so that all of eight
// pairs' are under way at once where the intermediate is 512 wide; with three the last ones ran alone.
template <int PER_WARP, int AHEAD>
__global__ void __launch_bounds__(kThreads, 4) gate_up_rows(const DecodeArguments a) {
  DECODE_DYNAMIC_SHARED(uint32_t, token_values);
  __shared__ float part[kWarps][16];
  constexpr int kChunks = PER_WARP * kWarps, kColumns = kChunks * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows16 = blockIdx.x, pair = blockIdx.y;
  decode::pdl_wait();
  decode::pdl_launch();
  float weight;
  const int expert = decode::routed_expert(a, pair, weight);
  if (expert < 0) return;
  const uint4* words = words_of(a.gate_up, expert, 2 * a.inter, kChunks, rows16, warp, lane);
  const uint32_t* scales = scales_of(a.gate_up_scale, expert, 2 * a.inter, kChunks, rows16, warp, lane);
  uint4 word[AHEAD][2];
  uint32_t scale[AHEAD];
  auto request = [&](int i) {
    word[i % AHEAD][0] = decode::load_once(words + i * kWarps * kChunkWords);
    word[i % AHEAD][1] = decode::load_once(words + i * kWarps * kChunkWords + 128);
    scale[i % AHEAD] = __ldg(scales + i * kWarps * kChunkScales);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) request(i);
  const uint4* x = reinterpret_cast<const uint4*>(a.x) + int64_t(pair / a.top_k) * (kColumns / 8);
  decode::take_groups<(kColumns / 8 + kThreads - 1) / kThreads>(
      x, kColumns / 8, [&](int v, const uint4 value) { put8(token_values, v, value); });
  __syncthreads();

  float acc[2][4] = {};
#pragma unroll
  for (int i = 0; i < PER_WARP; ++i) {
    multiply_chunk(acc, word[i % AHEAD], scale[i % AHEAD], token_values + warp * 64, i * kWarps * 128, lane);
    if (i + AHEAD < PER_WARP) request(i + AHEAD);
  }
  if (lane % 4 == 0) {
    part[warp][lane / 4] = acc[0][0] + acc[1][0];
    part[warp][8 + lane / 4] = acc[0][2] + acc[1][2];
  }
  __syncthreads();
  if (threadIdx.x < 8) {
    float gate = 0, up = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) gate += part[w][threadIdx.x], up += part[w][8 + threadIdx.x];
    gate *= Unpack::kUp, up *= Unpack::kUp;
    a.intermediate[int64_t(pair) * a.inter + rows16 * 8 + threadIdx.x] =
        __float2bfloat16(__fdividef(gate, 1.f + __expf(-gate)) * up);
  }
}

// Two chunks of int4 or bf16 weights at a time: 256 or 64 columns.
template <bool BF16>
__global__ void __launch_bounds__(kThreads, 4) down_rows(const DecodeArguments a) {
  DECODE_DYNAMIC_SHARED(uint32_t, values);  // the token's intermediate
  __shared__ decode::Pairs pairs[kWarps];
  __shared__ float part[kWarps][16];
  constexpr int kColumns = BF16 ? 32 : 128, kBatch = 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows16 = blockIdx.x, token = blockIdx.y;
  const int chunks = a.inter / kColumns;
  decode::pdl_launch();
  const int count = decode::list_pairs(a, token, false, pairs[warp]);
  float total[2] = {};
  bool waited = false;
  for (int k = warp; k < count || !waited; k += kWarps) {
    const bool here = k < count;
    const int entry = here ? pairs[warp].entry[k] : 0;
    const uint4* words = words_of(a.down, entry & 0xffff, a.hidden, chunks, rows16, 0, lane);
    const uint32_t* scales = scales_of(a.down_scale, entry & 0xffff, a.hidden, chunks, rows16, 0, lane);
    float acc[2][4] = {};
    for (int first = 0; first < chunks; first += kBatch) {
      uint4 word[kBatch][2];
      uint32_t scale[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (here && first + i < chunks) {
          word[i][0] = decode::load_once(words + (first + i) * kChunkWords);
          word[i][1] = decode::load_once(words + (first + i) * kChunkWords + 128);
          if (!BF16) scale[i] = __ldg(scales + (first + i) * kChunkScales);
        }
      if (!waited) {
        decode::pdl_wait();
        const int groups = a.top_k * a.inter / 8;
        decode::take_groups<2>(reinterpret_cast<const uint4*>(a.intermediate) + int64_t(token) * groups, groups,
                               [&](int v, const uint4 value) { put8(values, v, value); });
        __syncthreads();
        waited = true;
      }
      const uint32_t* mine = values + (entry >> 16) * (a.inter / 2);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!here || first + i >= chunks) continue;
        const int column = (first + i) * kColumns;
        if constexpr (BF16) {
          const uint4 x = take_steps(mine, column, lane), one = word[i][0], two = word[i][1];
          mma_bf16(acc[0], one.x, one.y, one.z, one.w, x.x, x.y);
          mma_bf16(acc[1], two.x, two.y, two.z, two.w, x.z, x.w);
        } else {
          multiply_chunk(acc, word[i], scale[i], mine, column, lane);
        }
      }
    }
    if (here) {
      const float weight = pairs[warp].weight[k] * (BF16 ? 1.f : Unpack::kUp);
      total[0] += (acc[0][0] + acc[1][0]) * weight, total[1] += (acc[0][2] + acc[1][2]) * weight;
    }
  }
  if (lane % 4 == 0) part[warp][lane / 4] = total[0], part[warp][8 + lane / 4] = total[1];
  __syncthreads();
  if (threadIdx.x < 16) {
    // Row g of the fragment is row 4 * (g / 2) + g % 2 of the sixteen, row g + 8 the second after it.
    const int g = threadIdx.x % 8, row = 4 * (g / 2) + g % 2 + threadIdx.x / 8 * 2;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += part[w][threadIdx.x];
    a.out[int64_t(token) * a.hidden + rows16 * 16 + row] = __float2bfloat16(sum);
  }
}

template <int PER_WARP, int AHEAD>
int start(const DecodeArguments& a, void* stream) {
  const int status = decode::launch(gate_up_rows<PER_WARP, AHEAD>, dim3(a.inter / 8, a.tokens * a.top_k), kThreads,
                                    size_t(a.hidden) * 2, a, stream);
  if (status) return status;
  return decode::launch(a.down_scale == nullptr ? down_rows<true> : down_rows<false>, dim3(a.hidden / 16, a.tokens),
                        kThreads, size_t(a.top_k) * a.inter * 2, a, stream);
}

}  // namespace w4a16

extern "C" int kimi_w4a16_decode(const w4a16::DecodeArguments* a, void* stream) {
  if (a->top_k >= decode::kMaxSlots) return host::kNoInstance;
  switch (a->hidden) {
    case 1024: return w4a16::start<1, 1>(*a, stream);
    case 7168: return w4a16::start<7, 2>(*a, stream);
    default: return host::kNoInstance;
  }
}
