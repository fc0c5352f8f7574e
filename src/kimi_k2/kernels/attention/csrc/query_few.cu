// query.cu for batch-invariant mode: what block_gemm.cuh in two terms makes of q_b behind its norm, bit for bit
// (common/csrc/few.cuh says how), then what absorb.cu makes of that, in one launch. A cluster of eight blocks owns a
// head of one token: each block computes 24 of the head's 192 rows, passes them to the others through shared memory,
// and then computes 64 of the 512 columns of W_UK^T q. One more cluster stores the entry.
#include "absorb.cuh"
#include "common/csrc/few.cuh"
#include "query.cuh"

namespace few {

using decode::kAll;
using decode::kInput;
using decode::kThreads;
using decode::kWarps;
using decode::QueryArguments;

constexpr int kBlocks = kInput / 128, kStages = (kBlocks + 7) / 8;
constexpr int kCluster = decode::kColumnBlocks, kRows = decode::kHead / kCluster, kTiles = kRows / 8;
constexpr int kUnits = kTiles * kStages;
static_assert(kUnits % 2 == 0, "as many for each warpgroup");

struct QueryMemory {
  alignas(1024) unsigned char w[kUnits][kUnitBytes];
  alignas(1024) unsigned char x[2][kStages][kAtomBytes];
  float product[kBlocks][kRows], factor[kTiles][kBlocks], squares[kWarps];
  alignas(16) float q[decode::kHead], parts[kWarps][decode::kColumns];
  alignas(8) uint64_t full[kUnits], head;  // head: once all of q is here
};

__global__ void __launch_bounds__(kThreads, 2) __cluster_dims__(kCluster, 1, 1)
    query_few(const __grid_constant__ CUtensorMap weights, const __grid_constant__ QueryArguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  QueryMemory& m = *reinterpret_cast<QueryMemory*>(raw);
  const int rank = blockIdx.x, head = blockIdx.y, token = blockIdx.z;
  const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(kAll, thread / 32, 0), group = warp / 4;
  const __nv_bfloat16* given = a.qkv_a + int64_t(token) * (kInput + decode::kEntry);
  if (head == a.heads) {
    decode::pdl_launch();
    if (rank > 0) return;
    decode::pdl_wait();
    decode::store_entry(a, token, given + kInput);
    return;
  }
  const int first = head * decode::kHead + rank * kRows;
  if (thread == 0) {
    if (smem_u32(raw) & 1023) __trap();
    for (int i = 0; i < kUnits; ++i) mbar_init(&m.full[i], 1);
    mbar_init(&m.head, 1);
    fence_mbar_init();
    mbar_arrive_expect_tx(&m.head, decode::kHead * 4);
    for (int i = 0; i < kUnits; ++i) {
      mbar_arrive_expect_tx(&m.full[i], kUnitBytes);
      tma_load_3d(smem_u32(m.w[i]), &weights, &m.full[i], 0, i / kTiles * 8, first + i % kTiles * 8, kEvictFirst);
    }
  }
  decode::cluster_begin();  // with barriers that others' stores may complete
  uint32_t keys[decode::kWarpKeys];
  decode::request_keys(a.w_uk, head, rank, keys);
  constexpr int kGroups = kInput / 8;
  const bool here = thread < kGroups;
  float scale[kTiles] = {};
  uint4 norm = make_uint4(0, 0, 0, 0), value = norm;
  if (here) {
    norm = decode::load_early(reinterpret_cast<const uint4*>(a.q_norm) + thread);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      scale[i] = decode::load_early(a.q_b_scale + (first + 8 * i) / 128 * kBlocks + thread / 16);
  }
  decode::pdl_wait();
  decode::pdl_launch();
  if (here) value = __ldcg(reinterpret_cast<const uint4*>(given) + thread);
  const float square = decode::sum_lanes(decode::squares8(value));
  if (lane == 0) m.squares[warp] = square;
  __syncthreads();
  const float whole = decode::sum_lanes(lane < kGroups / 32 ? m.squares[lane] : 0.f);
  value = decode::normed8(value, rsqrtf(whole / kInput + a.q_eps), norm);
  float x[8], token_scale;
  decode::widen(value, x);
  const uint2 fp8 = quantize_eight(x, token_scale), rest = quantize_rest(x, token_scale, fp8);
  if (here) {
    const int block = thread / 16, at = place_of(block, thread % 16);
    *reinterpret_cast<uint2*>(m.x[0][block / 8] + at) = fp8;
    *reinterpret_cast<uint2*>(m.x[1][block / 8] + at) = rest;
    if (thread % 16 == 0)
#pragma unroll
      for (int i = 0; i < kTiles; ++i) m.factor[i][block] = token_scale * scale[i];
  }
  fence_proxy_async();
  __syncthreads();

  constexpr int kTurns = kUnits / 2;
  float sum[kTurns][4];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int unit = 2 * i + group;
    mbar_wait(&m.full[unit], 0);
    wgmma_fence();
#pragma unroll
    for (int term = 0; term < 2; ++term) multiply(sum[i], m.w[unit], m.x[term][unit / kTiles], term > 0);
    wgmma_commit();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kTurns; ++i) fence_regs(sum[i]);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int unit = 2 * i + group, column = lane / 4, block = unit / kTiles * 8 + column;
    float two[2];
    if (pick(sum[i], column, two) && block < kBlocks)
      *reinterpret_cast<float2*>(&m.product[block][unit % kTiles * 8 + warp % 4 * 2]) = make_float2(two[0], two[1]);
  }
  __syncthreads();
  decode::cluster_wait();  // the others have begun, so that their shared memory is theirs
  // A thread a row and block of the cluster.
  if (thread < kRows * kCluster) {
    const int row = thread % kRows;
    const float q = sum_parts(&m.product[0][row], kRows, m.factor[row / 8], 1, kBlocks, a.parts);
    store_remote(&m.q[rank * kRows + row], thread / kRows, __bfloat162float(__float2bfloat16(q)), &m.head);
  }
  mbar_wait(&m.head, 0);

  decode::absorb_keys(m.q, keys, m.parts[warp]);
  __syncthreads();
  __nv_bfloat16* out = a.out + (int64_t(token) * a.heads + head) * decode::kEntry;
  constexpr int kPairs = decode::kRope / 2 / kCluster;
  if (thread < decode::kColumns) {
    out[rank * decode::kColumns + thread] = decode::absorbed(m.parts[0], thread);
  } else if (thread < decode::kColumns + kPairs) {
    const int pair = rank * kPairs + thread - decode::kColumns;
    const float* two = m.q + decode::kNope + 2 * pair;
    reinterpret_cast<__nv_bfloat162*>(out + decode::kRank)[pair] = decode::rotated(a, token, pair, two[0], two[1]);
  }
}

}  // namespace few

extern "C" int kimi_query_few(const decode::QueryArguments* a, void* stream) {
  CUtensorMap weights;
  if (int rc = host::encode_blocks(&weights, a->q_b, few::kInput, a->heads * decode::kHead, 8, 8)) return rc;
  const dim3 grid(few::kCluster, a->heads + 1, a->tokens);
  return host::launch(
      few::query_few,
      {grid, few::kThreads, sizeof(few::QueryMemory), static_cast<cudaStream_t>(stream), true, 1, host::kWholeShare},
      weights, *a);
}
