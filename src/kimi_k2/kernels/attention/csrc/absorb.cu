// Queries for attention and the new tokens' cache entries at decode, any number of tokens, in one order of sums: RoPE,
// W_UK absorbed, W_UK^T q. A block has 64 of the 512 columns of a head, whose weights it reads once, and some of the
// tokens; a warp has 16 of the 128 keys, a lane two columns, whose keys it adds one after another; then the warps' sums
// in their order.
#include "entry.cuh"

namespace decode {

constexpr int kColumns = 64, kColumnBlocks = kRank / kColumns, kWarpKeys = kNope / kWarps;

// This thread's weights of block `rank` of a head: on their way before any query is there.
__device__ __forceinline__ void request_keys(const __nv_bfloat16* w_uk, int head, int rank,
                                             uint32_t (&keys)[kWarpKeys]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(w_uk) +
                         (int64_t(head * kNope + warp * kWarpKeys) * kRank + rank * kColumns) / 2 + lane;
#pragma unroll
  for (int k = 0; k < kWarpKeys; ++k) keys[k] = load_early(from + k * (kRank / 2));
}

// The warp's sums of a query, 128 values in shared memory, to `parts` [64] of this warp.
__device__ __forceinline__ void absorb_keys(const float* q, const uint32_t (&keys)[kWarpKeys], float* parts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float4* mine = reinterpret_cast<const float4*>(q + warp * kWarpKeys);
  float two[2] = {};
#pragma unroll
  for (int k = 0; k < kWarpKeys; k += 4) {
    const float4 given = mine[k / 4];
    const float four[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      two[0] = fmaf(four[j], low(keys[k + j]), two[0]), two[1] = fmaf(four[j], high(keys[k + j]), two[1]);
  }
  reinterpret_cast<float2*>(parts)[lane] = make_float2(two[0], two[1]);
}

// Of a column of `parts` [kWarps][64].
__device__ __forceinline__ __nv_bfloat16 absorbed(const float* parts, int column) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w * kColumns + column];
  return __float2bfloat16(sum);
}

constexpr int kTokens = 16, kTogether = 4;  // of a block; whose sums are made together

struct AbsorbArguments : EntryArguments {
  const __nv_bfloat16* q;     // [tokens, heads, 192], not rotated
  const __nv_bfloat16* kv_a;  // [tokens, 576], rows kv_stride apart: latent before its norm | key before RoPE
};

struct AbsorbMemory {
  alignas(16) float q[kTokens][kNope], parts[kTogether][kWarps][kColumns];
};

__global__ void __launch_bounds__(kThreads) absorb(const AbsorbArguments a) {
  DECODE_DYNAMIC_SHARED(uint4, raw);
  AbsorbMemory& m = *reinterpret_cast<AbsorbMemory*>(raw);
  const int rank = blockIdx.x, head = blockIdx.y, first = blockIdx.z * kTokens, thread = threadIdx.x;
  const int count = a.tokens - first < kTokens ? a.tokens - first : kTokens;
  if (head == a.heads) {
    pdl_wait();
    pdl_launch();
    for (int t = first + rank; t < first + count; t += kColumnBlocks)
      store_entry(a, t, a.kv_a + int64_t(t) * a.kv_stride);
    return;
  }
  uint32_t keys[kWarpKeys];
  request_keys(a.w_uk, head, rank, keys);
  pdl_wait();
  pdl_launch();
  const auto of = [&](int t) { return a.q + (int64_t(first + t) * a.heads + head) * kHead; };
  const auto to = [&](int t) { return a.out + (int64_t(first + t) * a.heads + head) * kEntry; };
  for (int i = thread; i < count * (kNope / 8); i += kThreads) {
    float x[8];
    widen(__ldcg(reinterpret_cast<const uint4*>(of(i / (kNope / 8))) + i % (kNope / 8)), x);
#pragma unroll
    for (int j = 0; j < 8; ++j) m.q[i / (kNope / 8)][i % (kNope / 8) * 8 + j] = x[j];
  }
  constexpr int kPairs = kRope / 2 / kColumnBlocks;
  for (int i = thread; i < count * kPairs; i += kThreads) {
    const int t = i / kPairs, pair = rank * kPairs + i % kPairs;
    const __nv_bfloat16* two = of(t) + kNope + 2 * pair;
    reinterpret_cast<__nv_bfloat162*>(to(t) + kRank)[pair] =
        rotated(a, first + t, pair, widened(two), widened(two + 1));
  }
  __syncthreads();
  for (int base = 0; base < count; base += kTogether) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (base + i < count) absorb_keys(m.q[base + i], keys, m.parts[i][thread / 32]);
    __syncthreads();
    const int t = base + thread / kColumns, column = thread % kColumns;
    if (t < count) to(t)[rank * kColumns + column] = absorbed(m.parts[t - base][0], column);
    __syncthreads();
  }
}

}  // namespace decode

extern "C" int kimi_absorb(const decode::AbsorbArguments* a, void* stream) {
  static_assert(decode::kTogether * decode::kColumns == decode::kThreads, "a thread a column");
  const dim3 grid(decode::kColumnBlocks, a->heads + 1, (a->tokens + decode::kTokens - 1) / decode::kTokens);
  return decode::launch(decode::absorb, grid, decode::kThreads, sizeof(decode::AbsorbMemory), *a, stream);
}
