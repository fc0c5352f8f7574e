// INT4 experts for a few tokens, one token-expert pair at a time, in two launches: 8 gate rows and their 8 up rows a
// block, whose warps share out the hidden dimension; then 16 output rows a block, whose warps share out the token's
// experts. Weights go from memory straight into the fragments of mma.m16n8k16 (the layout of w4a16.cuh), of whose 8 token
// columns one is used. The second launch asks for its weights while the first still runs. Every sum has a fixed order.
#include "decode_routing.cuh"
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
  const uint4* down;          // int4, or bf16 if down_scale is null
  const uint4* down_scale;
  __nv_bfloat16* intermediate;  // [tokens, top_k, inter]
  __nv_bfloat16* out;           // [tokens, hidden]
  int tokens, top_k, experts, num_global, hidden, inter, ids64;
};

// Where 16 rows of a matrix lie: unit `rows16` of 16 rows, in matrices of `chunks` column chunks.
struct Unit {
  int64_t first;  // of chunk 0, counted in units' worth of a chunk
  int chunks;
  __device__ __forceinline__ Unit(int64_t expert, int matrix_rows, int rows16, int chunks) : chunks(chunks) {
    first = (expert * (matrix_rows / 256) + rows16 / 16) * chunks;
  }
  __device__ __forceinline__ int64_t words(int chunk, int rows16, int lane) const {
    return (first + chunk) * 1024 + rows16 % 16 / 4 * 256 + rows16 % 4 * 32 + lane;
  }
  __device__ __forceinline__ int64_t scales(int chunk, int rows16, int lane) const {
    return (first + chunk) * 128 + rows16 % 16 * 8 + lane / 4;
  }
};

// The values that thread q of four wants for two steps (32 columns), next to each other: `word` counts pairs of columns.
__device__ __forceinline__ int place_of_pair(int word) {
  const int step = word % 16 / 8, half = word % 8 / 4, thread = word % 4;
  return word / 16 * 16 + thread * 4 + step * 2 + half;
}
__device__ __forceinline__ void put8(uint32_t* token, int v, const uint4 values) {
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) token[place_of_pair(4 * v + i)] = words[i];
}
// Of the eight columns only the first, lanes 0 to 3, holds a token.
__device__ __forceinline__ uint4 take_steps(const uint32_t* token, int column, int lane) {
  return lane < 4 ? *reinterpret_cast<const uint4*>(token + column / 2 + 4 * lane) : make_uint4(0, 0, 0, 0);
}

// acc += 16 rows by 128 columns.
__device__ __forceinline__ void multiply_chunk(float (&acc)[4], const uint4 (&word)[2], const uint4 scale,
                                               const uint32_t* token, int column, int lane, const Unpack& unpack) {
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    const uint4 x = take_steps(token, column + k * 16, lane);
    uint32_t a[4];
    load_step<false>(a, word[k >> 2], scale, k, unpack);
    mma_16816(acc, a, x.x, x.y);
    load_step<false>(a, word[k >> 2], scale, k + 1, unpack);
    mma_16816(acc, a, x.z, x.w);
  }
}

// PER_WARP chunks of 128 columns a warp, AHEAD of them in flight. Four blocks of a multiprocessor, so that all of eight
// pairs' are under way at once where the intermediate is 512 wide; with three the last ones ran alone.
template <int PER_WARP, int AHEAD>
__global__ void __launch_bounds__(kThreads, 4) gate_up_rows(const DecodeArguments a) {
  DECODE_DYNAMIC_SHARED(uint32_t, token_values);
  __shared__ float part[kWarps][16];
  constexpr int kChunks = PER_WARP * kWarps, kColumns = kChunks * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows16 = blockIdx.x, pair = blockIdx.y;
  decode::wait_for_previous();
  decode::let_next_start();
  float weight;
  const int expert = decode::routed_expert(a, pair, weight);
  if (expert < 0) return;
  const Unit unit(expert, 2 * a.inter, rows16, kChunks);
  uint4 word[AHEAD][2], scale[AHEAD];
  auto request = [&](int i) {
    const int chunk = i * kWarps + warp;
    const uint4* at = a.gate_up + unit.words(chunk, rows16, lane);
    word[i % AHEAD][0] = decode::load_once(at);
    word[i % AHEAD][1] = decode::load_once(at + 128);
    scale[i % AHEAD] = __ldg(a.gate_up_scale + unit.scales(chunk, rows16, lane));
  };
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) request(i);
  const uint4* x = reinterpret_cast<const uint4*>(a.x) + int64_t(pair / a.top_k) * (kColumns / 8);
  decode::take_groups<(kColumns / 8 + kThreads - 1) / kThreads>(
      x, kColumns / 8, [&](int v, const uint4 value) { put8(token_values, v, value); });
  __syncthreads();

  const Unpack unpack;
  float acc[4] = {};
#pragma unroll
  for (int i = 0; i < PER_WARP; ++i) {
    multiply_chunk(acc, word[i % AHEAD], scale[i % AHEAD], token_values, (i * kWarps + warp) * 128, lane, unpack);
    if (i + AHEAD < PER_WARP) request(i + AHEAD);
  }
  if (lane % 4 == 0) part[warp][lane / 4] = acc[0], part[warp][8 + lane / 4] = acc[2];
  __syncthreads();
  if (threadIdx.x < 8) {
    float gate = 0, up = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) gate += part[w][threadIdx.x], up += part[w][8 + threadIdx.x];
    a.intermediate[int64_t(pair) * a.inter + rows16 * 8 + threadIdx.x] =
        __float2bfloat16(gate / (1.f + __expf(-gate)) * up);
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
  decode::let_next_start();
  const int count = decode::list_pairs(a, token, false, pairs[warp]);
  const Unpack unpack;
  float total[2] = {};
  bool waited = false;
  for (int k = warp; k < count || !waited; k += kWarps) {
    const bool here = k < count;
    const int entry = here ? pairs[warp].entry[k] : 0;
    const Unit unit(entry & 0xffff, a.hidden, rows16, chunks);
    float acc[4] = {};
    for (int first = 0; first < chunks; first += kBatch) {
      uint4 word[kBatch][2], scale[kBatch];
      const uint4* at = a.down + unit.words(first, rows16, lane);
      const uint4* scale_at = a.down_scale + unit.scales(first, rows16, lane);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        word[i][0] = word[i][1] = scale[i] = make_uint4(0, 0, 0, 0);
        if (!here || first + i >= chunks) continue;
        word[i][0] = decode::load_once(at + i * 1024);
        word[i][1] = decode::load_once(at + i * 1024 + 128);
        if (!BF16) scale[i] = __ldg(scale_at + i * 128);
      }
      if (!waited) {
        decode::wait_for_previous();
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
          const uint4 x = take_steps(mine, column, lane);
          const uint32_t one[4] = {word[i][0].x, word[i][0].y, word[i][0].z, word[i][0].w};
          const uint32_t two[4] = {word[i][1].x, word[i][1].y, word[i][1].z, word[i][1].w};
          mma_16816(acc, one, x.x, x.y);
          mma_16816(acc, two, x.z, x.w);
        } else {
          multiply_chunk(acc, word[i], scale[i], mine, column, lane, unpack);
        }
      }
    }
    if (here) total[0] += acc[0] * pairs[warp].weight[k], total[1] += acc[2] * pairs[warp].weight[k];
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
  if (a->top_k >= decode::kMaxSlots) return 1000;
  switch (a->hidden) {
    case 1024: return w4a16::start<1, 1>(*a, stream);
    case 7168: return w4a16::start<7, 2>(*a, stream);
    default: return 1000;
  }
}
