// Four-bit experts for a few tokens in two launches: 8 gate rows and their 8 up rows of an expert a block, whose warps
// share out the hidden dimension; then 16 output rows of a token a block, whose warps share out the token's experts.
// Weights go from memory straight into the fragments of mma.m16n8k16 (the layout of w4a16.cuh), of whose 8 token
// columns one is used, or in the first launch one for each token of the expert. The second launch asks for its weights
// while the first still runs. Every sum has a fixed order, which does not depend on how many tokens an expert has.
#include "common/csrc/ptx.cuh"
#include "routing.cuh"
#include "w4a16_formats.cuh"

namespace w4a16 {

using ptx::mma_bf16;

using decode::kThreads;
using decode::kWarps;

struct DecodeArguments {
  const __nv_bfloat16* x;     // [tokens, hidden]
  const void* topk_indices;   // int64 or int32 [tokens, top_k]; < 0: invalid
  const float* topk_weights;  // [tokens, top_k]; 0: skipped
  const int* expert_map;      // [num_global] to the local expert or -1; may be null
  const uint4* gate_up;       // in chunks, see w4a16.cuh
  const void* gate_up_scale;
  const uint4* down;  // four bits, or bf16 if down_scale is null
  const void* down_scale;
  __nv_bfloat16* intermediate;  // [tokens, top_k, inter]
  __nv_bfloat16* out;           // [tokens, hidden]
  const float* gate_up_all;     // of NVFP4, as in Args of w4a16.cuh
  const float* down_all;
  int tokens, top_k, experts, num_global, hidden, inter, ids64;
  int format;   // of w4a16.py's FORMATS
  int divides;  // the scales of all divide
};

// Where a lane's part of 16 rows lies: unit `rows16` of 16 rows, in matrices of `chunks` column chunks. A chunk further
// is kChunkWords further.
constexpr int kChunkWords = kChunkBytes / 16, kRowPairs = 128;
__device__ __forceinline__ const uint4* words_of(const uint4* matrices, int64_t expert, int matrix_rows, int chunks,
                                                 int rows16, int chunk, int lane) {
  return matrices + ((expert * (matrix_rows / 256) + rows16 / 16) * chunks + chunk) * kChunkWords +
         rows16 % 16 / 4 * 256 + rows16 % 4 * 32 + lane;
}
// Scales of rows lane / 4 and 8 further, of the 32 columns that are lane % 4 of a chunk. A chunk further is kRowPairs
// times F::GROUPS further.
template <class F>
__device__ __forceinline__ const typename F::Group* scales_of(const void* matrices, int64_t expert, int matrix_rows,
                                                              int chunks, int rows16, int chunk, int lane) {
  return static_cast<const typename F::Group*>(matrices) +
         ((expert * (matrix_rows / 256) + rows16 / 16) * chunks + chunk) * (kRowPairs * F::GROUPS) +
         (rows16 % 16 * 8 + lane / 4) * F::GROUPS + lane % 4 * F::GROUPS / 4;
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
template <class F>
__device__ __forceinline__ void multiply_chunk(float (&acc)[2][4], const uint4 (&word)[2], uint32_t scale,
                                               const uint32_t* token, int column, int lane) {
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const uint4 x = take_steps(token, column + group * 32, lane), four = word[group >> 1];
    const uint32_t pair = __shfl_sync(decode::kAll, scale, group, 4);
    const typename F::Unpack unpack(pair, 0), other(pair, 1);
    uint32_t a[4];
    unpack(a, group & 1 ? four.z : four.x);
    mma_bf16(acc[0], a[0], a[1], a[2], a[3], x.x, x.y);
    other(a, group & 1 ? four.w : four.y);
    mma_bf16(acc[1], a[0], a[1], a[2], a[3], x.z, x.w);
  }
}

// A warp's chunks of the first stage: PER_WARP of 128 columns, AHEAD of them in flight.
template <class F, int PER_WARP, int AHEAD>
struct GateUpWeights {
  static constexpr int kChunks = PER_WARP * kWarps;
  const uint4* words;
  const typename F::Group* scales;
  uint4 word[AHEAD][2];
  uint32_t scale[AHEAD];

  __device__ __forceinline__ GateUpWeights(const DecodeArguments& a, int expert, int rows16, int warp, int lane)
      : words(words_of(a.gate_up, expert, 2 * a.inter, kChunks, rows16, warp, lane)),
        scales(scales_of<F>(a.gate_up_scale, expert, 2 * a.inter, kChunks, rows16, warp, lane)) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) request(i);
  }
  __device__ __forceinline__ void request(int i) {
    word[i % AHEAD][0] = decode::load_once(words + i * kWarps * kChunkWords);
    word[i % AHEAD][1] = decode::load_once(words + i * kWarps * kChunkWords + 128);
    scale[i % AHEAD] = __ldg(scales + i * kWarps * kRowPairs * F::GROUPS);
  }
  // Chunk i, and the request of the one that takes its place.
  __device__ __forceinline__ void multiply(float (&acc)[2][4], int i, const uint32_t* token, int column, int lane) {
    multiply_chunk<F>(acc, word[i % AHEAD], scale[i % AHEAD], token, column, lane);
    if (i + AHEAD < PER_WARP) request(i + AHEAD);
  }
};

// `part` has a warp's 8 gate and 8 up sums every `stride` values.
template <class F>
__device__ __forceinline__ __nv_bfloat16 activated(const DecodeArguments& a, int expert, const float* part,
                                                   int stride) {
  float gate = 0, up = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) gate += part[w * stride], up += part[w * stride + 8];
  gate *= kUp, up *= kUp;
  if constexpr (F::WHOLE) {
    const float* all = a.gate_up_all + int64_t(expert) * 2 * a.inter;
    gate *= factor_of(all, a.divides), up *= factor_of(all + a.inter, a.divides);
  }
  return __float2bfloat16(__fdividef(gate, 1.f + __expf(-gate)) * up);
}

// Pairs of one expert that a block takes together, and how far apart their tokens' columns lie in shared memory, where
// eight lanes then read without conflicts.
constexpr int kMostSharers = 6, kRoundColumns = kWarps * 128, kTokenWords = kRoundColumns / 2 + 16;
constexpr size_t kSharedBytes = kMostSharers * kTokenWords * 4;

// An expert with several pairs: each is a column of the MMAs. A chunk a warp of every token's columns is in shared
// memory, the next in registers.
template <class F, int PER_WARP, int AHEAD>
__device__ __noinline__ void gate_up_shared(const DecodeArguments& a, int expert, uint64_t sharers, uint32_t* values) {
  __shared__ int pairs[kMostSharers];
  constexpr int kGroups = kRoundColumns / 8, kEach = (kMostSharers * kGroups + kThreads - 1) / kThreads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows16 = blockIdx.x;
  const uint4* x = reinterpret_cast<const uint4*>(a.x);
  for (int count = __popcll(sharers); count > 0; count -= kMostSharers) {
    const int here = min(count, kMostSharers);
    GateUpWeights<F, PER_WARP, AHEAD> weights(a, expert, rows16, warp, lane);
    for (int k = 0; k < here; ++k, sharers &= sharers - 1)
      if (threadIdx.x == 0) pairs[k] = __ffsll(sharers) - 1;
    __syncthreads();
    int from[kEach];
    uint4 next[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = threadIdx.x + k * kThreads;
      from[k] = pairs[min(i / kGroups, here - 1)] / a.top_k * PER_WARP * kGroups + i % kGroups;
    }
    auto fetch = [&](int round) {
#pragma unroll
      for (int k = 0; k < kEach; ++k)
        if (threadIdx.x + k * kThreads < here * kGroups) next[k] = __ldcg(x + from[k] + round * kGroups);
    };
    fetch(0);
    const uint32_t* mine = values + min(lane / 4, here - 1) * kTokenWords + warp * 64;
    float acc[2][4] = {};
#pragma unroll
    for (int round = 0; round < PER_WARP; ++round) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int i = threadIdx.x + k * kThreads;
        if (i < here * kGroups) put8(values + i / kGroups * kTokenWords, i % kGroups, next[k]);
      }
      __syncthreads();
      if (round + 1 < PER_WARP) fetch(round + 1);
      weights.multiply(acc, round, mine, 0, lane);
      __syncthreads();
    }
    float* part = reinterpret_cast<float*>(values);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = lane % 4 * 2 + i;
      if (column >= here) continue;
      float* to = part + (warp * kMostSharers + column) * 16 + lane / 4;
      to[0] = acc[0][i] + acc[1][i], to[8] = acc[0][2 + i] + acc[1][2 + i];
    }
    __syncthreads();
    if (threadIdx.x < 8 * here) {
      const int column = threadIdx.x / 8, row = threadIdx.x % 8;
      a.intermediate[int64_t(pairs[column]) * a.inter + rows16 * 8 + row] =
          activated<F>(a, expert, part + column * 16 + row, kMostSharers * 16);
    }
    __syncthreads();
  }
}

// The expert of a pair, -1 if it does not count, and all pairs that have it (bit i: pair i). Beyond 64 pairs each is
// taken alone. By a warp.
struct Sharers {
  int expert;
  uint64_t pairs;
};
__device__ __forceinline__ Sharers find_sharers(const DecodeArguments& a, int pair, int lane) {
  const int pairs = a.tokens * a.top_k;
  if (pairs > 64) {
    float weight;
    return {decode::routed_expert(a, pair, weight), 0};
  }
  decode::Choice choice[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) choice[i] = decode::load_choice(a, min(lane + 32 * i, pairs - 1));
  int experts[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) experts[i] = lane + 32 * i < pairs ? decode::local_expert(a, choice[i]) : -1;
  const int expert = __shfl_sync(decode::kAll, pair < 32 ? experts[0] : experts[1], pair % 32);
  const uint64_t upper = __ballot_sync(decode::kAll, experts[1] == expert);
  return {expert, upper << 32 | __ballot_sync(decode::kAll, experts[0] == expert)};
}

// Four blocks of an SM, so that all of eight pairs' are under way at once where the intermediate is 512 wide; with
// three the last ones ran alone. SHARE: pairs of one expert are taken together, which costs others 3 %.
template <class F, int PER_WARP, int AHEAD, bool SHARE>
__global__ void __launch_bounds__(kThreads, 4) gate_up_rows(const __grid_constant__ DecodeArguments a) {
  DECODE_DYNAMIC_SHARED(uint32_t, token_values);
  __shared__ float part[kWarps][16];
  constexpr int kColumns = PER_WARP * kRoundColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows16 = blockIdx.x, pair = blockIdx.y;
  decode::pdl_wait();
  decode::pdl_launch();
  int expert;
  if constexpr (SHARE) {
    __shared__ Sharers found;
    if (warp == 0) {
      const Sharers mine = find_sharers(a, pair, lane);
      if (lane == 0) found = mine;
    }
    __syncthreads();
    expert = found.expert;
    const uint64_t sharers = found.pairs;
    if (expert < 0) return;
    if (sharers & (sharers - 1)) {  // the first of them is taken for all
      if (__ffsll(sharers) - 1 == pair) gate_up_shared<F, PER_WARP, AHEAD>(a, expert, sharers, token_values);
      return;
    }
  } else {
    float weight;
    expert = decode::routed_expert(a, pair, weight);
    if (expert < 0) return;
  }
  GateUpWeights<F, PER_WARP, AHEAD> weights(a, expert, rows16, warp, lane);
  const uint4* x = reinterpret_cast<const uint4*>(a.x) + int64_t(pair / a.top_k) * (kColumns / 8);
  decode::take_groups<(kColumns / 8 + kThreads - 1) / kThreads>(
      x, kColumns / 8, [&](int v, const uint4 value) { put8(token_values, v, value); });
  __syncthreads();

  float acc[2][4] = {};
#pragma unroll
  for (int i = 0; i < PER_WARP; ++i) weights.multiply(acc, i, token_values + warp * 64, i * kRoundColumns, lane);
  if (lane % 4 == 0) {
    part[warp][lane / 4] = acc[0][0] + acc[1][0];
    part[warp][8 + lane / 4] = acc[0][2] + acc[1][2];
  }
  __syncthreads();
  if (threadIdx.x < 8)
    a.intermediate[int64_t(pair) * a.inter + rows16 * 8 + threadIdx.x] =
        activated<F>(a, expert, part[0] + threadIdx.x, 16);
}

// Two chunks of four-bit or bf16 weights at a time: 256 or 64 columns.
template <class F, bool BF16>
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
    const typename F::Group* scales = scales_of<F>(a.down_scale, entry & 0xffff, a.hidden, chunks, rows16, 0, lane);
    float acc[2][4] = {};
    for (int first = 0; first < chunks; first += kBatch) {
      uint4 word[kBatch][2];
      uint32_t scale[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (here && first + i < chunks) {
          word[i][0] = decode::load_once(words + (first + i) * kChunkWords);
          word[i][1] = decode::load_once(words + (first + i) * kChunkWords + 128);
          if (!BF16) scale[i] = __ldg(scales + (first + i) * kRowPairs * F::GROUPS);
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
          multiply_chunk<F>(acc, word[i], scale[i], mine, column, lane);
        }
      }
    }
    if (here) {
      float weight = pairs[warp].weight[k] * (BF16 ? 1.f : kUp);
      if constexpr (F::WHOLE) weight *= factor_of(a.down_all + int64_t(entry & 0xffff) * a.hidden, a.divides);
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

// Tokens times intermediate size up to which pairs that share an expert are fast enough alone.
constexpr int kRowsAlone = 1536;

template <class F, int PER_WARP, int AHEAD>
int start(const DecodeArguments& a, void* stream) {
  const bool share = a.tokens > 1 && a.tokens * a.inter > kRowsAlone;
  const size_t token = size_t(a.hidden) * 2, shared = share && token < kSharedBytes ? kSharedBytes : token;
  const auto gate_up = share ? gate_up_rows<F, PER_WARP, AHEAD, true> : gate_up_rows<F, PER_WARP, AHEAD, false>;
  const int status = decode::launch(gate_up, dim3(a.inter / 8, a.tokens * a.top_k), kThreads, shared, a, stream);
  if (status) return status;
  auto down = down_rows<F, false>;
  if constexpr (F::OFFSET)
    if (a.down_scale == nullptr) down = down_rows<F, true>;
  return decode::launch(down, dim3(a.hidden / 16, a.tokens), kThreads, size_t(a.top_k) * a.inter * 2, a, stream);
}

template <class F>
int start_of(const DecodeArguments& a, void* stream) {
  switch (a.hidden) {
    case 1024: return start<F, 1, 1>(a, stream);
    case 7168: return start<F, 7, 2>(a, stream);
    default: return host::kNoInstance;
  }
}

}  // namespace w4a16

extern "C" int kimi_w4a16_decode(const w4a16::DecodeArguments* a, void* stream) {
  if (a->top_k >= decode::kMaxSlots) return host::kNoInstance;
  switch (a->format) {
    case 0: return w4a16::start_of<w4a16::Int4>(*a, stream);
    case 1: return w4a16::start_of<w4a16::Mxfp4>(*a, stream);
    case 2: return w4a16::start_of<w4a16::Nvfp4>(*a, stream);
    case 3: return w4a16::start_of<w4a16::Int4Groups<64>>(*a, stream);
    case 4: return w4a16::start_of<w4a16::Int4Groups<128>>(*a, stream);
    default: return host::kNoInstance;
  }
}
