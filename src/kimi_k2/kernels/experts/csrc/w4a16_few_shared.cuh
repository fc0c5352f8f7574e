// The shared expert in bf16 within the launches of w4a16_few.cu: dense_gemm.cuh's GEMMs, bit for bit, by few_bf16.cuh.
// The first is in eight parts of the columns, so that one instruction's 64 rows are four rows of gate and the same of
// up by all parts, for all tokens together; the second is in one part.
#pragma once
#include "common/csrc/decode.cuh"
#include "common/csrc/few_bf16.cuh"

namespace w4a16 {

using namespace few_bf16;

constexpr int kSharedParts = 8, kSharedRows = 4;  // of gate, and of up, a block of the first launch
constexpr int kMostRing = 16;

struct SharedArguments {
  const __nv_bfloat16* x;       // [tokens, hidden]
  __nv_bfloat16* intermediate;  // [tokens, inter]
  int tokens, hidden, inter;
  int ring;  // units of the first launch that are on their way at most; 0: there is no shared expert
};

// N: parts times tokens (one or two), the rows of the right operand, part after part.
template <int N>
struct SharedMemory {
  float sums[64][2];  // of a token
  alignas(8) uint64_t full[kMostRing], empty[kMostRing];
  static __host__ __device__ int before(const SharedArguments& s) {
    return s.ring * kUnitBytes + s.hidden / 64 / kSharedParts * N * 128;
  }
  static size_t bytes(const SharedArguments& s) { return before(s) + sizeof(SharedMemory); }
};

// By 256 threads: four values of the intermediate of every token.
template <int N>
__device__ __forceinline__ void shared_gate_up(unsigned char* raw, const CUtensorMap& weights, const SharedArguments& s,
                                               int index) {
  constexpr int kEach = N / kSharedParts, kMakers = 256;
  const int stages = s.hidden / 64 / kSharedParts, first = index * kSharedRows;
  unsigned char* const tokens = raw + s.ring * kUnitBytes;
  SharedMemory<N>& m = *reinterpret_cast<SharedMemory<N>*>(raw + SharedMemory<N>::before(s));
  const int thread = threadIdx.x, warp = __shfl_sync(decode::kAll, thread / 32, 0);
  auto request = [&](int i) {
    const int st = i % s.ring;
    mbar_arrive_expect_tx(&m.full[st], kUnitBytes);
    for (int up = 0; up < 2; ++up)
      tma_load_4d(smem_u32(raw + st * kUnitBytes + up * (kUnitBytes / 2)), &weights, &m.full[st], 0,
                  up * s.inter + first, i, 0, kEvictFirst);
  };
  if (thread == 128) {
    if (smem_u32(raw) & 1023) __trap();
    open_ring(m.full, m.empty, s.ring, stages, request);
  }
  pdl_wait();
  pdl_launch();
  const int groups = s.hidden / 8, of_part = groups / kSharedParts;
  for (int t = 0; t < s.tokens; ++t)
#pragma unroll 4
    for (int v = thread; v < groups; v += kMakers)
      put_eight<N>(tokens, v % of_part, v / of_part * kEach + t,
                   __ldcg(reinterpret_cast<const uint4*>(s.x) + int64_t(t) * groups + v));
  fence_proxy_async();
  __syncthreads();
  if (warp >= 4) {
    if (thread == 128) feed_ring(m.empty, s.ring, stages, request);
    return;
  }
  float acc[N / 2];
  multiply_units<N>(acc, raw, tokens, m.full, m.empty, s.ring, stages);
  keep_own<N>(acc, m.sums, kEach, s.tokens, [](int row) { return row % 32 / kSharedRows; });
  named_sync(3, 128);
  const int t = thread / kSharedRows, row = thread % kSharedRows;
  if (t >= s.tokens) return;
  float gate = 0.f, up = 0.f;
#pragma unroll
  for (int p = 0; p < kSharedParts; ++p)
    gate += m.sums[p * kSharedRows + row][t], up += m.sums[32 + p * kSharedRows + row][t];
  // Gate, up, silu and the product are rounded, as PyTorch's launches leave them.
  const float g = __bfloat162float(__float2bfloat16(gate));
  s.intermediate[int64_t(t) * s.inter + first + row] =
      __hmul(__float2bfloat16(g / (1.f + expf(-g))), __float2bfloat16(up));
}

constexpr int kMostSharedInter = 256;

// Of the second launch: the weights' units, and behind them the token's operand, whose first rows alone count.
struct SharedDownMemory {
  alignas(1024) unsigned char w[1][kUnitBytes];  // and further ones
  static __host__ __device__ int bytes(const SharedArguments& s) {
    return s.ring ? s.inter / 64 * (kUnitBytes + 1024) : 0;
  }
};

// By one warpgroup: rounded sums of 64 rows. `raw` holds the weights once `full` says so.
__device__ __forceinline__ void shared_down(const unsigned char* raw, uint64_t* full, const SharedArguments& s,
                                            float* out) {
  const int units = s.inter / 64, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const unsigned char* token = raw + units * kUnitBytes;
  mbar_wait(full, 0);
  float acc[4];
  wgmma_fence();
  for (int i = 0; i < units; ++i) {
    const uint64_t left = desc_sw128(smem_u32(raw + i * kUnitBytes)), right = desc_sw128(smem_u32(token + i * 1024));
#pragma unroll
    for (int k = 0; k < 4; ++k) WgmmaBf16<8>::go(acc, left + 2 * k, right + 2 * k, i + k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_regs(acc);
  if (lane % 4) return;
  const int row = warp * 16 + lane / 4;
  out[row] = __bfloat162float(__float2bfloat16(acc[0]));
  out[row + 8] = __bfloat162float(__float2bfloat16(acc[2]));
}

}  // namespace w4a16
