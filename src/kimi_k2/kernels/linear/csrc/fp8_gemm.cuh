// y = RMSNorm(x + delta) W^T for up to eight or sixteen tokens and e4m3 weights with one float32 scale a 128x128 block,
// norm and delta optional. A warp takes SETS times 16 / SEGMENTS rows and STEPS steps of their columns; SPLIT warps
// share rows, in each of the CLUSTER blocks that share the columns, so that a block converts only its part of the
// tokens.
//
// All weights are on their way to shared memory before the tokens are waited for, each lane's to places of its own.
// Held in registers they would unroll the loop, and a launch of a microsecond or two waits longer for the instructions
// of such a kernel than it computes; nor would the next launch find registers to begin with. The norm's quotient
// multiplies the finished sums: nothing but the tokens' arrival is waited for, and they are rounded once, to float16
// behind the norm's weight.
#pragma once
#include "half.cuh"
#include "tokens.cuh"

namespace decode {

template <int TOKENS, int SEGMENTS, int STEPS, int SETS, int SPLIT, int TILES, int CLUSTER>
struct GemmMemory {
  static constexpr int kBlockWarps = SPLIT * TILES, kBlockThreads = 32 * kBlockWarps;
  static constexpr int kWarpRows = SETS * 16 / SEGMENTS, kRows = TILES * kWarpRows;
  static constexpr int kColumns = STEPS * SPLIT * SEGMENTS * 64, kGroups = kColumns / 8;
  // Tokens that the block's threads take at once, and groups of 8 columns a thread.
  static constexpr int kMost = TOKENS < kBlockThreads / kGroups ? TOKENS : kBlockThreads / kGroups;
  static constexpr int kAtOnce = kMost >= 8 ? 8 : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
  static constexpr int kEach = (kGroups + kBlockThreads - 1) / kBlockThreads;
  static constexpr int kWidth = kColumns * CLUSTER;
  static_assert(kColumns % 128 == 0 && 128 % kRows == 0, "whole scale blocks");
  uint4 fp8[STEPS][SETS * 2][kBlockThreads];
  uint4 token[TOKENS][kGroups + 1];  // so that two tokens' columns lie in different banks
  float factor[kColumns / 128]
              [TOKENS < 8 ? 8 : TOKENS];  // of 128 columns of a token: the weight's scale and what undoes the token's
  float squares[TOKENS][kBlockWarps], parts[kBlockWarps][TOKENS][kWarpRows];
  float sums[CLUSTER][TOKENS][kRows], all_squares[CLUSTER][TOKENS];  // of every block, in the first one's memory
};

// A block's columns of the tokens to float16 in shared memory, and their squares' sums.
template <int TOKENS, bool NORMED, class Memory>
__device__ __forceinline__ void convert(const LinearArguments& a, int rank, bool stores_total,
                                        const uint4 (&norm)[Memory::kEach], const float (&scale)[Memory::kEach],
                                        Memory& m) {
  constexpr int kEach = Memory::kEach, kLanes = Memory::kBlockThreads / Memory::kAtOnce;
  constexpr int kRounds = (TOKENS + Memory::kAtOnce - 1) / Memory::kAtOnce;
  constexpr int kBatch = kRounds < 4 ? kRounds : kEach > 1 ? 2 : 4;
  const int thread = threadIdx.x % kLanes, token = threadIdx.x / kLanes;
#pragma unroll
  for (int base = 0; base < kRounds; base += kBatch) {
    // All loads before the first use: their latencies would add up.
    uint4 value[kBatch][kEach], delta[kBatch][kEach];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int v = thread + i * kLanes, t = (base + b) * Memory::kAtOnce + token;
        const int column = rank * Memory::kGroups + v;
        const int64_t at = int64_t(t) * (Memory::kWidth / 8) + column;
        const bool here = v < Memory::kGroups && t < a.tokens;
        const __nv_bfloat16* x = a.x + int64_t(t) * a.x_stride;
        value[b][i] = here ? __ldcg(reinterpret_cast<const uint4*>(x) + column) : make_uint4(0, 0, 0, 0);
        if (a.delta != nullptr)
          delta[b][i] = here ? __ldcg(reinterpret_cast<const uint4*>(a.delta) + at) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int t = (base + b) * Memory::kAtOnce + token;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int v = thread + i * kLanes;
        const bool here = v < Memory::kGroups && t < TOKENS;
        if (a.delta != nullptr) {
          value[b][i] = add8(value[b][i], delta[b][i]);
          if (stores_total && here && t < a.tokens)
            reinterpret_cast<uint4*>(a.total)[int64_t(t) * (Memory::kWidth / 8) + rank * Memory::kGroups + v] =
                value[b][i];
        }
        float x[8], back;
        widen(value[b][i], x);
        if (NORMED) {
          float w[8];
          widen(norm[i], w);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum += x[j] * x[j], x[j] *= w[j];
        }
        const uint4 halves = to_halves(x, back);
        if (here) m.token[t][half_place(v)] = halves;
        if (here && v % 16 == 0) m.factor[v / 16][t] = back * scale[i];
      }
      if (NORMED) {
        sum = sum_lanes(sum);
        if (thread % 32 == 0 && t < TOKENS) m.squares[t][thread / 32] = sum;
      }
    }
  }
}

template <int TOKENS, bool NORMED, int SEGMENTS, int STEPS, int SETS, int SPLIT, int TILES, int CLUSTER>
__global__ void __launch_bounds__(32 * SPLIT * TILES) fp8_gemm(const LinearArguments a) {
  using Memory = GemmMemory<TOKENS, SEGMENTS, STEPS, SETS, SPLIT, TILES, CLUSTER>;
  using Way = Step<SEGMENTS>;
  constexpr int kBlockThreads = Memory::kBlockThreads, kLanes = kBlockThreads / Memory::kAtOnce;
  DECODE_DYNAMIC_SHARED(uint4, raw);
  Memory& m = *reinterpret_cast<Memory*>(raw);
  const Way way;
  const int thread = threadIdx.x, warp = thread / 32, rank = blockIdx.x % CLUSTER;
  const int rows = blockIdx.x / CLUSTER * Memory::kRows, first = warp % SPLIT * STEPS;
  if (CLUSTER > 1) cluster_begin();
  const int row = rows + warp / SPLIT * Memory::kWarpRows + way.row();
  // Scales and the norm's weight come from memory, too, and depend on no launch.
  uint4 norm[Memory::kEach];
  float scale[Memory::kEach];
#pragma unroll
  for (int i = 0; i < Memory::kEach; ++i) {
    const int mine = thread % kLanes + i * kLanes, v = rank * Memory::kGroups + (mine < Memory::kGroups ? mine : 0);
    scale[i] = __ldg(a.scale + rows / 128 * (Memory::kWidth / 128) + v / 16);
    norm[i] = NORMED ? __ldg(reinterpret_cast<const uint4*>(a.norm) + v) : make_uint4(0, 0, 0, 0);
  }
  const uint8_t* weights =
      static_cast<const uint8_t*>(a.weight) + rank * Memory::kColumns + first * Way::kColumns + way.column();
#pragma unroll
  for (int s = 0; s < SETS * 2; ++s) {
    const int at = row + s * Way::kRows;  // what lies past the last row is not stored
    const uint8_t* of = weights + int64_t(at < a.rows ? at : a.rows - 1) * Memory::kWidth;
#pragma unroll
    for (int c = 0; c < STEPS; ++c) cp_async_16(&m.fp8[c][s][thread], of + c * Way::kColumns);
  }
  pdl_wait();
  pdl_launch();
  convert<TOKENS, NORMED>(a, rank, blockIdx.x < CLUSTER, norm, scale, m);
  cp_async_wait();
  __syncthreads();

  constexpr int kMmas = (TOKENS + Way::kTokens - 1) / Way::kTokens;
  float total[kMmas][SETS * 2] = {};
#pragma unroll 1
  for (int c = 0; c < STEPS; ++c) {
    uint4 x[kMmas][2];
    const float* factor = m.factor[((first + c) * SEGMENTS + way.segment) / 2];
#pragma unroll
    for (int p = 0; p < kMmas; ++p) {
      const int t = p * Way::kTokens + way.given();
      way.take(m.token[t < TOKENS ? t : TOKENS - 1], first + c, x[p]);
    }
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      float sum[kMmas][2];
      way.multiply(sum, m.fp8[c][2 * s][thread], m.fp8[c][2 * s + 1][thread], x);
#pragma unroll
      for (int p = 0; p < kMmas; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) total[p][2 * s + h] += sum[p][h] * factor[p * Way::kTokens + way.token()];
    }
  }
#pragma unroll
  for (int p = 0; p < kMmas; ++p)
#pragma unroll
    for (int s = 0; s < SETS * 2; ++s) {
      const float sum = way.whole(total[p][s]);
      const int t = p * Way::kTokens + way.token();
      if (t < TOKENS) m.parts[warp][t][s * Way::kRows + way.row()] = sum;
    }
  __syncthreads();
  auto block_sum = [&](int t, int r) {
    float sum = 0;
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) sum += m.parts[r / Memory::kWarpRows * SPLIT + s][t][r % Memory::kWarpRows];
    return sum;
  };
  auto block_squares = [&](int t) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kLanes / 32; ++w) sum += m.squares[t][w];
    return sum;
  };
  constexpr int kSums = TOKENS * Memory::kRows, kRounds = (kSums + kBlockThreads - 1) / kBlockThreads;
  if (CLUSTER > 1) {
    cluster_wait();  // the others have begun, so that their shared memory is theirs
    Memory& leader = *map_shared_rank(&m, 0);
    if (thread < TOKENS) leader.all_squares[rank][thread] = block_squares(thread);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int o = thread + round * kBlockThreads, t = o / Memory::kRows, r = o % Memory::kRows;
      if (o < kSums) leader.sums[rank][t][r] = block_sum(t, r);
    }
    cluster_arrive();
    cluster_wait();
    if (rank > 0) return;
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int o = thread + round * kBlockThreads, t = o / Memory::kRows, r = o % Memory::kRows;
    if (o >= kSums || rows + r >= a.rows || t >= a.tokens) continue;
    float sum = 0, squares = 0;
    if (CLUSTER > 1) {
#pragma unroll
      for (int c = 0; c < CLUSTER; ++c) sum += m.sums[c][t][r], squares += m.all_squares[c][t];
    } else {
      sum = block_sum(t, r), squares = block_squares(t);
    }
    if (NORMED) sum *= rsqrtf(squares / Memory::kWidth + a.eps);
    a.out[int64_t(t) * a.rows + rows + r] = __float2bfloat16(sum);
  }
}

template <int TOKENS, int SEGMENTS, int STEPS, int SETS, int SPLIT, int TILES, int CLUSTER = 1>
int start_gemm(const LinearArguments& a, void* stream) {
  using Memory = GemmMemory<TOKENS, SEGMENTS, STEPS, SETS, SPLIT, TILES, CLUSTER>;
  const int blocks = (a.rows + Memory::kRows - 1) / Memory::kRows * CLUSTER;
  const auto kernel = a.norm != nullptr ? fp8_gemm<TOKENS, true, SEGMENTS, STEPS, SETS, SPLIT, TILES, CLUSTER>
                                        : fp8_gemm<TOKENS, false, SEGMENTS, STEPS, SETS, SPLIT, TILES, CLUSTER>;
  return launch(kernel, dim3(blocks), Memory::kBlockThreads, sizeof(Memory), a, stream, CLUSTER);
}

}  // namespace decode
