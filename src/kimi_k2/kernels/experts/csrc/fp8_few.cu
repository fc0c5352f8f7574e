// The FP8 experts of a few tokens with the shared expert, bit for bit what fp8_kernel.cuh without fusion,
// block_gemm.cuh in two terms for the shared expert, and the sum of both make of them. Two launches, one token-expert
// pair at a time in the first, one token in the second.
//
// The sums of a block of 128 columns are the matrix instructions' alone; in which order such sums are added is what a
// GEMM of many tokens fixes. So one instruction's 64 rows are 8 rows of W by 8 blocks of their columns, row after row
// (or 16 by 4, or 32 by 2), and its tokens' 8 columns are blocks of one token: of what it makes, the sums of a row's
// and a token's block with the same number are wanted. No block of threads shares a row with another one.
#include "common/csrc/launch.cuh"
#include "common/csrc/quantize.cuh"
#include "common/csrc/wgmma.cuh"
#include "expert_arguments.cuh"

namespace few {

using namespace ptx;
using decode::ExpertArguments;
using decode::slots_of;

constexpr int kUnitBytes = 64 * 128;  // of W: rows by blocks of columns, 64 of both together
constexpr int kAtomBytes = 1024;      // of tokens: eight blocks of columns

// Where in its atom the `v`-th eight values of block of columns `block` lie, of sixteen times eight.
__device__ __forceinline__ int place_of(int block, int v) {
  const int row = block % 8;
  return row * 128 + ((v / 2) ^ row) * 16 + v % 2 * 8;
}

// d (+)= a unit by an atom of a token.
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned char* w, const unsigned char* x, bool more) {
  const uint64_t left = desc_sw128(smem_u32(w)), right = descriptor(smem_u32(x), 16, kAtomBytes);
#pragma unroll
  for (int j = 0; j < 4; ++j) WgmmaE4m3<8>::go(d, left + 2 * j, right + 2 * j, more || j > 0);
}

// A lane has rows g and g + 8 of its warp's 16 and columns 2 q, 2 q + 1 of an atom's: whether one of these is `column`.
__device__ __forceinline__ bool pick(const float* sum, int column, float (&two)[2]) {
  two[0] = column % 2 ? sum[1] : sum[0], two[1] = column % 2 ? sum[3] : sum[2];
  return threadIdx.x % 4 == column / 2;
}

// The sums of `blocks` blocks of columns times their factors, in `parts` parts, each from its first block on; then the
// parts: block_gemm.cuh's order.
__device__ __forceinline__ float sum_parts(const float* product, int step, const float* factor, int factor_step,
                                           int blocks, int parts) {
  float whole = 0.f;
  for (int part = 0, kb = 0; part < parts; ++part) {
    const int end = (part + 1) * blocks / parts;
    float some = 0.f;
#pragma unroll 14
    for (; kb < end; ++kb) some = fmaf(product[kb * step], factor[kb * factor_step], some);
    whole = parts == 1 ? some : whole + some;
  }
  return whole;
}

constexpr int kThreads = 256;
constexpr int kRing = 3;    // units of a warpgroup on their way in the first launch
constexpr int kUpRows = 8;  // of gate and of up, a block
constexpr int kUpEach = 4;  // groups of eight values of a token a thread
constexpr int kMostSlots = 10, kDownEach = 3;

__device__ __forceinline__ int has_shared(const ExpertArguments& a) { return a.shared_gate_up != nullptr; }

struct UpMemory {
  alignas(1024) unsigned char w[2][kRing][kUnitBytes];  // of gate and of up rows
  alignas(1024) unsigned char x[2][8][kAtomBytes];
  float product[64][2 * kUpRows], factor[64][2];  // by block of columns: gate, then up
  alignas(8) uint64_t full[2][kRing];
};

// A warpgroup's rows, gate or up: a stage is eight blocks of columns.
template <int TERMS, class Request>
__device__ __forceinline__ void multiply_rows(UpMemory& m, int group, int stages, int blocks, Request request) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, column = lane / 4;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    const int place = stage % kRing;
    mbar_wait(&m.full[group][place], stage / kRing & 1);
    float sum[4], two[2];
    wgmma_fence();
#pragma unroll
    for (int term = 0; term < TERMS; ++term) multiply(sum, m.w[group][place], m.x[term][stage], term > 0);
    wgmma_commit();
    wgmma_wait<0>();
    fence_regs(sum);
    named_sync(1 + group, 128);  // all of the warpgroup has read the unit
    if (threadIdx.x % 128 == 0 && stage + kRing < stages) request(stage + kRing);
    const int block = stage * 8 + column;
    if (pick(sum, column, two) && block < blocks)
      *reinterpret_cast<float2*>(&m.product[block][group * kUpRows + warp * 2]) = make_float2(two[0], two[1]);
  }
}

// silu(gate) * up of eight values of a slot's intermediate.
__global__ void __launch_bounds__(kThreads, 3)
    few_gate_up(const __grid_constant__ CUtensorMap routed_map, const __grid_constant__ CUtensorMap shared_map,
                const __grid_constant__ ExpertArguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  UpMemory& m = *reinterpret_cast<UpMemory*>(raw);
  const int thread = threadIdx.x, group = __shfl_sync(decode::kAll, thread / 128, 0);
  const int first = blockIdx.x * kUpRows, slot = blockIdx.y, token = blockIdx.z;
  const int blocks = a.hidden / 128, stages = (blocks + 7) / 8, groups = a.inter / 128;
  const bool shared = has_shared(a) && slot == 0;
  int expert = 0;
  if (!shared) {
    decode::pdl_wait();
    decode::pdl_launch();
    float weight;
    expert = decode::routed_expert(a, token * a.top_k + slot - has_shared(a), weight);
    if (expert < 0) return;
  }
  const CUtensorMap* map = shared ? &shared_map : &routed_map;
  const int row = expert * 2 * a.inter + group * a.inter + first;
  const auto request = [&](int stage) {
    uint64_t* full = &m.full[group][stage % kRing];
    mbar_arrive_expect_tx(full, kUnitBytes);
    tma_load_3d(smem_u32(m.w[group][stage % kRing]), map, full, 0, stage * 8, row, kEvictFirst);
  };
  if (thread % 128 == 0) {
    if (smem_u32(raw) & 1023) __trap();
    for (int i = 0; i < kRing; ++i) mbar_init(&m.full[group][i], 1);
    fence_mbar_init();
    for (int i = 0; i < min(kRing, stages); ++i) request(i);
  }
  const float* scales =
      (shared ? a.shared_gate_up_scale : a.gate_up_scale + (size_t)expert * 2 * groups * blocks) + first / 128 * blocks;
  float scale[kUpEach][2];
#pragma unroll
  for (int i = 0; i < kUpEach; ++i) {
    const int block = min((thread + i * kThreads) / 16, blocks - 1);
    scale[i][0] = __ldg(scales + block), scale[i][1] = __ldg(scales + groups * blocks + block);
  }
  if (shared) {
    decode::pdl_wait();
    decode::pdl_launch();
  }
  uint4 value[kUpEach];
#pragma unroll
  for (int i = 0; i < kUpEach; ++i) {
    const int v = thread + i * kThreads;
    value[i] = make_uint4(0, 0, 0, 0);
    if (v < blocks * 16) value[i] = __ldcg(reinterpret_cast<const uint4*>(a.x) + int64_t(token) * blocks * 16 + v);
  }
#pragma unroll
  for (int i = 0; i < kUpEach; ++i) {
    const int v = thread + i * kThreads, block = v / 16;
    if (i * kThreads >= blocks * 16) break;
    float x[8], token_scale;
    decode::widen(value[i], x);
    const uint2 fp8 = quantize_eight(x, token_scale);
    if (v >= blocks * 16) continue;
    const int at = place_of(block, v % 16);
    *reinterpret_cast<uint2*>(m.x[0][block / 8] + at) = fp8;
    if (shared) *reinterpret_cast<uint2*>(m.x[1][block / 8] + at) = quantize_rest(x, token_scale, fp8);
    if (v % 16 < 2) m.factor[block][v % 16] = token_scale * (v % 16 ? scale[i][1] : scale[i][0]);
  }
  fence_proxy_async();
  __syncthreads();
  if (shared) multiply_rows<2>(m, group, stages, blocks, request);
  else multiply_rows<1>(m, group, stages, blocks, request);
  __syncthreads();
  if (thread >= 32) return;
  const int mine = thread % (2 * kUpRows);
  const float gate = sum_parts(&m.product[0][mine], 2 * kUpRows, &m.factor[0][mine / kUpRows], 2, blocks,
                               shared ? a.shared_up_parts : a.up_parts);
  const float up = __shfl_down_sync(decode::kAll, gate, kUpRows);
  if (thread >= kUpRows) return;
  float made;
  if (shared) {
    // Gate, up, silu and the product are rounded, as a launch each leaves them.
    const float g = __bfloat162float(__float2bfloat16(gate));
    made = __bfloat162float(__hmul(__float2bfloat16(__fdividef(g, 1.f + __expf(-g))), __float2bfloat16(up)));
  } else {
    made = __fdividef(gate, 1.f + __expf(-gate)) * up;
  }
  a.intermediate[(int64_t(token) * slots_of(a) + slot) * a.inter + first + thread] = made;
}

constexpr int kDownAtoms = 16 * kDownEach / 8;
struct DownMemory {
  alignas(1024) unsigned char x[kDownAtoms][kAtomBytes], rest[kAtomBytes];  // rest: the shared expert's second term
  float product[kMostSlots * 64];                                           // [blocks of columns of all slots][rows]
  float factor[16 * kDownEach], weight[kMostSlots];
  int expert[kMostSlots];
  alignas(8) uint64_t full[kMostSlots];
  alignas(1024) unsigned char w[1][kUnitBytes];  // and of further slots
  static size_t bytes(int slots) { return sizeof(DownMemory) + size_t(slots - 1) * kUnitBytes; }
};

// 64 / BLOCKS rows of a token's output over all its experts, of BLOCKS blocks of columns each.
template <int BLOCKS>
__global__ void __launch_bounds__(kThreads, 2)
    few_down(const __grid_constant__ CUtensorMap routed_map, const __grid_constant__ CUtensorMap shared_map,
             const __grid_constant__ ExpertArguments a) {
  constexpr int kRows = 64 / BLOCKS;
  extern __shared__ __align__(1024) unsigned char raw[];
  DownMemory& m = *reinterpret_cast<DownMemory*>(raw);
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = __shfl_sync(decode::kAll, thread / 32, 0), group = warp / 4;
  const int first = blockIdx.x * kRows, token = blockIdx.y;
  const int slots = slots_of(a), shared_slots = has_shared(a), values = slots * BLOCKS * 16;
  if (thread < slots) {
    const bool shared = thread < shared_slots;
    float weight = 1.f;
    const int expert = shared ? 0 : decode::routed_expert(a, token * a.top_k + thread - shared_slots, weight);
    m.expert[thread] = expert, m.weight[thread] = weight;
    if (thread == 0 && (smem_u32(raw) & 1023)) __trap();
    mbar_init(&m.full[thread], 1);
    fence_mbar_init();
    if (expert >= 0) {
      mbar_arrive_expect_tx(&m.full[thread], kUnitBytes);
      tma_load_3d(smem_u32(m.w[thread]), shared ? &shared_map : &routed_map, &m.full[thread], 0, 0,
                  expert * a.hidden + first, kEvictFirst);
    } else {
      mbar_arrive(&m.full[thread]);
    }
  }
  __syncthreads();
  float scale[kDownEach];
#pragma unroll
  for (int i = 0; i < kDownEach; ++i) {
    const int v = thread + i * kThreads, block = v / 16, slot = block / BLOCKS;
    scale[i] = 0.f;
    if (v >= values || m.expert[slot] < 0) continue;
    const float* scales =
        slot < shared_slots ? a.shared_down_scale : a.down_scale + (size_t)m.expert[slot] * (a.hidden / 128) * BLOCKS;
    scale[i] = __ldg(scales + first / 128 * BLOCKS + block % BLOCKS);
  }
  decode::pdl_wait();
  decode::pdl_launch();
  float4 value[kDownEach][2];
#pragma unroll
  for (int i = 0; i < kDownEach; ++i) {
    const int v = thread + i * kThreads;
    value[i][0] = value[i][1] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (v >= values || m.expert[v / 16 / BLOCKS] < 0) continue;  // never written
    const float4* from = reinterpret_cast<const float4*>(a.intermediate) + (int64_t(token) * values + v) * 2;
    value[i][0] = __ldcg(from), value[i][1] = __ldcg(from + 1);
  }
#pragma unroll
  for (int i = 0; i < kDownEach; ++i) {
    const int v = thread + i * kThreads, block = v / 16;
    if (i * kThreads >= values) break;
    const float4 u = value[i][0], w = value[i][1];
    const float x[8] = {u.x, u.y, u.z, u.w, w.x, w.y, w.z, w.w};
    float token_scale;
    const uint2 fp8 = quantize_eight(x, token_scale), rest = quantize_rest(x, token_scale, fp8);
    if (v >= values) continue;
    const int at = place_of(block, v % 16);
    *reinterpret_cast<uint2*>(m.x[block / 8] + at) = fp8;
    if (block < shared_slots * BLOCKS) *reinterpret_cast<uint2*>(m.rest + at) = rest;
    if (v % 16 == 0) m.factor[block] = token_scale * scale[i];
  }
  fence_proxy_async();
  __syncthreads();

  // Warpgroups take turns with the slots; a turn too many repeats the last one.
  constexpr int kTurns = kMostSlots / 2;
  float sum[kTurns][4];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int slot = min(2 * i + group, slots - 1);
    mbar_wait(&m.full[slot], 0);
    wgmma_fence();
    multiply(sum[i], m.w[slot], m.x[slot * BLOCKS / 8], false);
    wgmma_commit();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kTurns; ++i) fence_regs(sum[i]);
  if (group < shared_slots) {  // the shared expert's second term, on top of the first one's sums
    wgmma_fence();
    multiply(sum[0], m.w[0], m.rest, true);
    wgmma_commit();
    wgmma_wait<0>();
    fence_regs(sum[0]);
  }
  const int row = warp % 4 * (16 / BLOCKS) + lane / 4 / BLOCKS, block = lane / 4 % BLOCKS;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int slot = 2 * i + group;
    float two[2];
    if (slot >= slots || !pick(sum[i], (slot * BLOCKS + block) % 8, two)) continue;
    float* to = m.product + (slot * BLOCKS + block) * kRows + row;
    to[0] = two[0], to[8 / BLOCKS] = two[1];
  }
  __syncthreads();
  if (thread >= kRows) return;
  float routed = 0.f;
  for (int slot = shared_slots; slot < slots; ++slot) {
    if (m.expert[slot] < 0) continue;
    const float of_pair =
        sum_parts(m.product + slot * BLOCKS * kRows + thread, kRows, m.factor + slot * BLOCKS, 1, BLOCKS, 1);
    routed = fmaf(__bfloat162float(__float2bfloat16(of_pair)), m.weight[slot], routed);
  }
  __nv_bfloat16 result = __float2bfloat16(routed);
  if (shared_slots) {
    const float of_shared = sum_parts(m.product + thread, kRows, m.factor, 1, BLOCKS, a.shared_down_parts);
    result = __float2bfloat16(__bfloat162float(result) + __bfloat162float(__float2bfloat16(of_shared)));
  }
  a.out[int64_t(token) * a.hidden + first + thread] = result;
}

template <int BLOCKS>
int start(const ExpertArguments& a, cudaStream_t stream) {
  const int shared = a.shared_gate_up != nullptr, slots = a.top_k + shared;
  CUtensorMap up, down, shared_up, shared_down;
  if (int rc = host::encode_blocks(&up, a.gate_up, a.hidden, (uint64_t)a.experts * 2 * a.inter, 8, kUpRows)) return rc;
  if (int rc = host::encode_blocks(&down, a.down, a.inter, (uint64_t)a.experts * a.hidden, BLOCKS, 64 / BLOCKS))
    return rc;
  shared_up = up, shared_down = down;
  if (shared) {
    if (int rc = host::encode_blocks(&shared_up, a.shared_gate_up, a.hidden, 2 * a.inter, 8, kUpRows)) return rc;
    if (int rc = host::encode_blocks(&shared_down, a.shared_down, a.inter, a.hidden, BLOCKS, 64 / BLOCKS)) return rc;
  }
  const host::Launch first{
      dim3(a.inter / kUpRows, slots, a.tokens), kThreads, sizeof(UpMemory), stream, true, 1, host::kWholeShare};
  if (int rc = host::launch(few_gate_up, first, up, shared_up, a)) return rc;
  const host::Launch second{
      dim3(a.hidden * BLOCKS / 64, a.tokens), kThreads, DownMemory::bytes(slots), stream, true, 1, host::kWholeShare};
  return host::launch(few_down<BLOCKS>, second, down, shared_down, a);
}

}  // namespace few

// Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_experts_few(const few::ExpertArguments* args, void* stream_ptr) {
  const few::ExpertArguments& a = *args;
  const auto stream = static_cast<cudaStream_t>(stream_ptr);
  const int slots = a.top_k + (a.shared_gate_up != nullptr), blocks = a.inter / 128;
  if (slots > few::kMostSlots || slots * blocks > 16 * few::kDownEach || a.hidden > 8192) return host::kNoInstance;
  if (blocks == 1) return few::start<1>(a, stream);
  if (blocks == 2) return few::start<2>(a, stream);
  return blocks == 4 ? few::start<4>(a, stream) : host::kNoInstance;
}
