// Between attention's first GEMMs and attention itself, at decode: q_b behind its norm, RoPE, W_UK absorbed into the
// queries, the new token's cache entry. A cluster of eight blocks owns a head of one token: each block computes 24 of
// the head's 192 rows, passes them to the others through shared memory, and then computes 64 of the 512 columns of
// W_UK^T q. All weights are asked for before the launch before this one has ended. One more cluster stores the entry.
#include "entry.cuh"
#include "linear/csrc/tokens.cuh"

namespace decode {

constexpr int kInput = 1536;  // columns of q_b

// The rows of `qkv_a` are kv_stride apart.
struct QueryArguments : EntryArguments {
  const __nv_bfloat16* qkv_a;   // [tokens, 1536 + 576]: q_a | latent before its norm | key before RoPE
  const __nv_bfloat16* q_norm;  // [1536]
  const uint8_t* q_b;           // e4m3 [heads * 192, 1536], or bf16
  const float* q_b_scale;       // [ceil(heads * 192 / 128), 12], null of bf16
  float q_eps;
};

constexpr int kBlocks = 8, kRows = kHead / kBlocks,
              kWide = kRank / kBlocks;  // of a cluster; a block's rows and columns
constexpr int kEach = kRows / kWarps, kKeys = kNope / 32;

struct QueryMemory {
  uint4 token[kInput / 8], norm[kInput / 8];
  float sums[1][kWarps], q[kHead], parts[kWarps][kWide];
};

template <bool FP8>
__global__ void __launch_bounds__(kThreads, 2) query(const QueryArguments a) {
  constexpr int kBytes = FP8 ? 1 : 2, kLoads = kInput * kBytes / 512, kScales = FP8 ? kEach : 1;
  DECODE_DYNAMIC_SHARED(uint4, raw);
  QueryMemory& m = *reinterpret_cast<QueryMemory*>(raw);
  const int rank = blockIdx.x, head = blockIdx.y, token = blockIdx.z;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  if (head == a.heads) {
    pdl_launch();
    if (rank > 0) return;
    pdl_wait();
    store_entry(a, token, a.qkv_a + int64_t(token) * (kInput + kEntry) + kInput);
    return;
  }
  cluster_begin();
  const int mine = rank * kRows + warp;  // a warp's rows are kWarps apart, each with scales of its own
  uint4 weight[kEach][kLoads], keys[kKeys];
  float scale[kScales];
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int row = head * kHead + mine + r * kWarps;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      weight[r][i] = load_once(a.q_b + int64_t(row) * (kInput * kBytes) + i * 512 + lane * 16);
    if constexpr (FP8) scale[r] = lane < kInput / 128 ? __ldg(a.q_b_scale + row / 128 * (kInput / 128) + lane) : 0.f;
  }
  const int group = thread % 8, key = thread / 8;
#pragma unroll
  for (int i = 0; i < kKeys; ++i)
    keys[i] = load_once(a.w_uk + (int64_t(head) * kNope + key + i * 32) * kRank + rank * kWide + group * 8);
  LinearArguments input{};
  input.x = a.qkv_a + int64_t(token) * (kInput + kEntry);
  input.norm = a.q_norm, input.tokens = 1, input.eps = a.q_eps;
  request_norm<1, kInput>(input, m.token);
  pdl_wait();
  prepare<1, kInput, FP8>(input, m.token, m.sums);
  pdl_launch();

  float total[kEach] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float x[FP8 ? 16 : 8];
    if constexpr (FP8) take16(m.token, kInput, i * 32 + lane, x);
    else widen(m.token[i * 32 + lane], x);
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      if constexpr (FP8) {
        total[r] += dot16(weight[r][i], x) * __shfl_sync(kAll, scale[r], i * 4 + lane / 8);
      } else {
        float w[8];
        widen(weight[r][i], w);
#pragma unroll
        for (int j = 0; j < 8; ++j) total[r] += w[j] * x[j];
      }
    }
  }
  const float inverse = inverse_norm<kInput>(input, m.sums[0]);
  cluster_wait();  // the others have begun, so that their shared memory is theirs
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const float q = __bfloat162float(__float2bfloat16(sum_lanes(total[r]) * inverse));
    if (lane < kBlocks) map_shared_rank(m.q, lane)[mine + r * kWarps] = q;
  }
  cluster_arrive();
  cluster_wait();

  float sum[8] = {};
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    float w[8];
    widen(keys[i], w);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += m.q[key + i * 32] * w[j];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    sum[j] += __shfl_xor_sync(kAll, sum[j], 8);
    sum[j] += __shfl_xor_sync(kAll, sum[j], 16);
    if (lane < 8) m.parts[warp][group * 8 + j] = sum[j];
  }
  __syncthreads();
  __nv_bfloat16* out = a.out + (int64_t(token) * a.heads + head) * kEntry;
  if (thread < kWide) {
    float column = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) column += m.parts[w][thread];
    out[rank * kWide + thread] = __float2bfloat16(column);
  } else if (thread < kWide + kRope / 2 / kBlocks) {
    const int pair = rank * (kRope / 2 / kBlocks) + thread - kWide;
    reinterpret_cast<__nv_bfloat162*>(out + kRank)[pair] =
        rotated(a, token, pair, m.q[kNope + 2 * pair], m.q[kNope + 2 * pair + 1]);
  }
}

}  // namespace decode

extern "C" int kimi_query(const decode::QueryArguments* a, void* stream) {
  return decode::launch(a->q_b_scale == nullptr ? decode::query<false> : decode::query<true>,
                        dim3(decode::kBlocks, a->heads + 1, a->tokens), decode::kThreads, sizeof(decode::QueryMemory),
                        *a, stream, decode::kBlocks);
}
