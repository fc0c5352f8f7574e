// block_gemm.cuh's GEMM of a few tokens, bit for bit (few.cuh says how), of bf16 values, which every block quantizes in
// two terms itself, or of what quantize.cu has made of them. A block takes some rows of W, which it asks for before it
// waits for the launch before it.
//
// The residual sum and norm may come before: then an SM has one block, so that none does this twice, and the norm's
// quotient is part of the tokens' scales, so that nothing waits for the sum over a row.
#include "common/csrc/few.cuh"
#include "rowwise/csrc/norm.cuh"

namespace few {

enum Input { kPlain, kQuantized, kAdded };

template <Input INPUT>
constexpr int kThreads = INPUT == kAdded ? 512 : 256;
constexpr int kEach = 4;  // groups of eight of the tokens' values a thread; of a token
constexpr int kAddedEach = 2;
constexpr int kMostUnits = 16;  // of a block

struct GemmArguments {
  const __nv_bfloat16* x;      // [tokens, columns], or null
  const __nv_bfloat16* delta;  // [tokens, columns], to be added to x, then
  const __nv_bfloat16* norm;   // [columns], or null
  __nv_bfloat16* total;        // x + delta
  const float* token_scale;    // else [columns / 128, scale_stride], of e4m3 [2, tokens, columns]
  const float* weight_scale;   // [ceil(rows / 128), columns / 128]
  __nv_bfloat16* out;          // [tokens, rows]
  int scale_stride, rows, columns;
  int parts;  // of the columns, summed apart
  int tiles;  // of eight rows, a block
  float eps;
};

struct Sizes {
  int stages, units, kept;  // of eight blocks of columns; of a tile and a stage; rows of a block
  __host__ __device__ Sizes(const GemmArguments& a)
      : stages((a.columns / 128 + 7) / 8), units(stages * a.tiles), kept(8 * a.tiles) {}
};

template <int TOKENS>
struct GemmMemory {
  float factor[TOKENS][64];  // by block of columns
  float scale[TOKENS][64], squares[TOKENS][32];
  alignas(8) uint64_t full[kMostUnits], token;
  // Before this [2][TOKENS][stages] atoms of the tokens, then [units] of W; behind it the sums [TOKENS][blocks of
  // columns][kept].
  __host__ __device__ static int before(const Sizes& s) {
    return 2 * TOKENS * s.stages * kAtomBytes + s.units * kUnitBytes;
  }
  static size_t bytes(const Sizes& s, int columns) {
    return before(s) + sizeof(GemmMemory) + size_t(TOKENS) * (columns / 128) * s.kept * 4;
  }
};

// The tokens, quantized: a warp has two blocks of columns at a time.
template <int TOKENS>
__device__ __forceinline__ void quantize_tokens(const GemmArguments& a, GemmMemory<TOKENS>& m, unsigned char* tokens,
                                                const Sizes& sizes, const float* scales) {
  const int groups = a.columns / 8, all = TOKENS * groups;
  uint4 value[kEach];
  float scale[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int v = threadIdx.x + i * kThreads<kPlain>;
    scale[i] = v < all ? decode::load_early(scales + v % groups / 16) : 0.f;
  }
  decode::pdl_wait();
  decode::pdl_launch();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int v = threadIdx.x + i * kThreads<kPlain>;
    value[i] = v < all ? __ldcg(reinterpret_cast<const uint4*>(a.x) + v) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int v = threadIdx.x + i * kThreads<kPlain>, t = TOKENS > 1 ? v / groups : 0, block = (v - t * groups) / 16;
    if (i * kThreads<kPlain> >= all) break;
    float x[8], token_scale;
    decode::widen(value[i], x);
    const uint2 fp8 = quantize_eight(x, token_scale), rest = quantize_rest(x, token_scale, fp8);
    if (v >= all) continue;
    unsigned char* const to = tokens + (t * sizes.stages + block / 8) * kAtomBytes + place_of(block, v % 16);
    *reinterpret_cast<uint2*>(to) = fp8;
    *reinterpret_cast<uint2*>(to + TOKENS * sizes.stages * kAtomBytes) = rest;
    if (v % 16 == 0) m.factor[t][block] = token_scale * scale[i];
  }
  fence_proxy_async();
}

// The same of their sums with `delta`, times the norm's weight. `inverse`, the norm's quotient, comes to the factors
// once all squares are there.
template <int TOKENS>
__device__ __forceinline__ void add_tokens(const GemmArguments& a, GemmMemory<TOKENS>& m, unsigned char* tokens,
                                           const Sizes& sizes, const float* scales) {
  constexpr int kLanes = kThreads<kAdded>;
  const int groups = a.columns / 8, blocks = a.columns / 128, thread = threadIdx.x, lane = thread % 32;
  const int mine = thread / 32 - (kLanes / 32 - TOKENS);  // a token whose factors this warp makes
  uint4 norm[kAddedEach], value[TOKENS][kAddedEach], delta[TOKENS][kAddedEach];
  float scale[2] = {};
#pragma unroll
  for (int i = 0; i < kAddedEach; ++i) {
    const int v = min(thread + i * kLanes, groups - 1);
    norm[i] = decode::load_early(reinterpret_cast<const uint4*>(a.norm) + v);
  }
  if (mine >= 0)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (i * 32 + lane < blocks) scale[i] = decode::load_early(scales + i * 32 + lane);
  decode::pdl_wait();
  decode::pdl_launch();
#pragma unroll
  for (int t = 0; t < TOKENS; ++t)
#pragma unroll
    for (int i = 0; i < kAddedEach; ++i) {
      const int v = thread + i * kLanes;
      value[t][i] = delta[t][i] = make_uint4(0, 0, 0, 0);
      if (v >= groups) continue;
      value[t][i] = __ldcg(reinterpret_cast<const uint4*>(a.x) + t * groups + v);
      delta[t][i] = __ldcg(reinterpret_cast<const uint4*>(a.delta) + t * groups + v);
    }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t)
#pragma unroll
    for (int i = 0; i < kAddedEach; ++i) {
      const int v = thread + i * kLanes, block = v / 16;
      const uint4 total = decode::add8(value[t][i], delta[t][i]);
      if (blockIdx.x == 0 && v < groups) reinterpret_cast<uint4*>(a.total)[t * groups + v] = total;
      const float square = decode::sum_lanes(decode::squares8(total));
      if (lane == 0) m.squares[t][v / 32] = square;
      float x[8], token_scale;
      decode::widen(decode::normed8(total, 1.f, norm[i]), x);
      const uint2 fp8 = quantize_eight(x, token_scale), rest = quantize_rest(x, token_scale, fp8);
      if (v >= groups) continue;
      unsigned char* const to = tokens + (t * sizes.stages + block / 8) * kAtomBytes + place_of(block, v % 16);
      *reinterpret_cast<uint2*>(to) = fp8;
      *reinterpret_cast<uint2*>(to + TOKENS * sizes.stages * kAtomBytes) = rest;
      if (v % 16 == 0) m.scale[t][block] = token_scale;
    }
  fence_proxy_async();
  __syncthreads();
  if (mine < 0) return;
  const float inverse = rsqrtf(decode::sum_lanes(m.squares[mine][lane]) / a.columns + a.eps);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (i * 32 + lane < blocks) m.factor[mine][i * 32 + lane] = m.scale[mine][i * 32 + lane] * inverse * scale[i];
}

template <Input INPUT, int TOKENS>
__global__ void __launch_bounds__(kThreads<INPUT>, INPUT == kAdded ? 1 : 2)
    few_gemm(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap quantized,
             const __grid_constant__ GemmArguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const Sizes sizes(a);
  const int step = sizes.stages * kAtomBytes;  // from one token's atoms to the next one's
  unsigned char *const tokens = raw, *const w = raw + 2 * TOKENS * step;
  using Memory = GemmMemory<TOKENS>;
  Memory& m = *reinterpret_cast<Memory*>(raw + Memory::before(sizes));
  float* const product = reinterpret_cast<float*>(&m + 1);
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = __shfl_sync(decode::kAll, thread / 32, 0), group = warp / 4;
  const int blocks = a.columns / 128, first = blockIdx.x * sizes.kept;
  if (thread == 0) {
    if (smem_u32(raw) & 1023) __trap();
    for (int i = 0; i < sizes.units; ++i) mbar_init(&m.full[i], 1);
    mbar_init(&m.token, 1);
    fence_mbar_init();
    for (int i = 0; i < sizes.units; ++i) {
      mbar_arrive_expect_tx(&m.full[i], kUnitBytes);
      tma_load_3d(smem_u32(w + i * kUnitBytes), &weights, &m.full[i], 0, i / a.tiles * 8, first + i % a.tiles * 8,
                  kEvictFirst);
    }
  }
  const float* scales = a.weight_scale + min(first / 128, (a.rows - 1) / 128) * blocks;
  if constexpr (INPUT == kQuantized) {
    const int t = TOKENS > 1 ? thread / blocks : 0, block = thread - t * blocks;
    const bool here = thread < TOKENS * blocks;
    const float scale = here ? decode::load_early(scales + block) : 0.f;
    decode::pdl_wait();
    decode::pdl_launch();
    if (thread == 0) {
      mbar_arrive_expect_tx(&m.token, 2 * TOKENS * a.columns);
      for (int one = 0; one < 2 * TOKENS; ++one)
        tma_load_2d(smem_u32(tokens + one * step), &quantized, &m.token, 0, one * blocks, kEvictNormal);
    }
    if (here) m.factor[t][block] = __ldcg(a.token_scale + block * a.scale_stride + t) * scale;
    __syncthreads();
    mbar_wait(&m.token, 0);
  } else if constexpr (INPUT == kAdded) {
    add_tokens<TOKENS>(a, m, tokens, sizes, scales);
  } else {
    quantize_tokens<TOKENS>(a, m, tokens, sizes, scales);
    __syncthreads();
  }

  // Warpgroups take turns with the units. A turn too many repeats the last one: a branch would have the compiler
  // serialize the instructions.
  constexpr int kTurns = 2, kGroups = kThreads<INPUT> / 128;
  for (int base = group; base < sizes.units; base += kGroups * kTurns) {
    float sum[kTurns][4 * TOKENS];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int unit = min(base + kGroups * i, sizes.units - 1), stage = unit / a.tiles;
      mbar_wait(&m.full[unit], 0);
      wgmma_fence();
#pragma unroll
      for (int term = 0; term < 2; ++term)
        multiply<TOKENS>(sum[i], w + unit * kUnitBytes, tokens + term * TOKENS * step + stage * kAtomBytes, step,
                         term > 0);
      wgmma_commit();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kTurns; ++i) fence_regs(sum[i]);
    const int column = lane / 4;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int unit = base + kGroups * i, block = unit / a.tiles * 8 + column;
      if (unit >= sizes.units || block >= blocks) continue;
#pragma unroll
      for (int t = 0; t < TOKENS; ++t)
        if (float two[2]; pick(sum[i] + 4 * t, column, two))
          *reinterpret_cast<float2*>(product + (t * blocks + block) * sizes.kept + unit % a.tiles * 8 + warp % 4 * 2) =
              make_float2(two[0], two[1]);
    }
  }
  __syncthreads();
  const int t = TOKENS > 1 ? thread / sizes.kept : 0, row = thread - t * sizes.kept;
  if (thread < TOKENS * sizes.kept && first + row < a.rows)
    a.out[int64_t(t) * a.rows + first + row] = __float2bfloat16(
        sum_parts(product + t * blocks * sizes.kept + row, sizes.kept, m.factor[t], 1, blocks, a.parts));
}

template <Input INPUT, int TOKENS>
int start_gemm(const GemmArguments& a, const void* x, const void* weight, cudaStream_t stream) {
  constexpr int kLanes = kThreads<INPUT>, kMost = INPUT == kAdded ? TOKENS * kAddedEach : kEach;
  const Sizes sizes(a);
  const int blocks = a.columns / 128;
  const size_t bytes = GemmMemory<TOKENS>::bytes(sizes, a.columns);
  if (128 % sizes.kept || sizes.units > kMostUnits || blocks > 64 || bytes > host::kMaxShared) return host::kNoInstance;
  if (INPUT == kQuantized ? TOKENS * blocks > kLanes : TOKENS * a.columns > 8 * kMost * kLanes)
    return host::kNoInstance;
  CUtensorMap weights, quantized;
  if (int rc = host::encode_blocks(&weights, weight, a.columns, a.rows, 8, 8)) return rc;
  quantized = weights;
  if (INPUT == kQuantized)
    if (int rc = host::encode_rows(&quantized, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, x, 128, 2 * TOKENS * blocks, blocks))
      return rc;
  const dim3 grid((a.rows + sizes.kept - 1) / sizes.kept);
  return host::launch(few_gemm<INPUT, TOKENS>, {grid, kLanes, bytes, stream, true, 1, host::kWholeShare}, weights,
                      quantized, a);
}

template <Input INPUT>
int by_tokens(const GemmArguments& a, int tokens, const void* x, const void* weight, void* stream_ptr) {
  const auto stream = static_cast<cudaStream_t>(stream_ptr);
  if (tokens == 1) return start_gemm<INPUT, 1>(a, x, weight, stream);
  if (tokens == 2) return start_gemm<INPUT, 2>(a, x, weight, stream);
  if (tokens == 3) return start_gemm<INPUT, 3>(a, x, weight, stream);
  return host::kNoInstance;
}

}  // namespace few

// x is bf16 [tokens, columns] or, with its scales, e4m3 [2, tokens, columns].
extern "C" int kimi_few_gemm(const void* x, const void* token_scale, const void* weight, const void* weight_scale,
                             void* out, int tokens, int scale_stride, int rows, int columns, int parts, int tiles,
                             void* stream) {
  few::GemmArguments a{};
  a.weight_scale = static_cast<const float*>(weight_scale), a.out = static_cast<__nv_bfloat16*>(out);
  a.scale_stride = scale_stride, a.rows = rows, a.columns = columns, a.parts = parts, a.tiles = tiles;
  if (token_scale == nullptr) {
    a.x = static_cast<const __nv_bfloat16*>(x);
    return few::by_tokens<few::kPlain>(a, tokens, x, weight, stream);
  }
  a.token_scale = static_cast<const float*>(token_scale);
  return few::by_tokens<few::kQuantized>(a, tokens, x, weight, stream);
}

// Of RMSNorm(x + delta), the sum to `total`.
extern "C" int kimi_few_add_gemm(const void* x, const void* delta, const void* norm, void* total, const void* weight,
                                 const void* weight_scale, void* out, int tokens, int rows, int columns, int parts,
                                 int tiles, float eps, void* stream) {
  const auto in = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
  few::GemmArguments a{};
  a.x = in(x), a.delta = in(delta), a.norm = in(norm), a.total = static_cast<__nv_bfloat16*>(total);
  a.weight_scale = static_cast<const float*>(weight_scale), a.out = static_cast<__nv_bfloat16*>(out);
  a.rows = rows, a.columns = columns, a.parts = parts, a.tiles = tiles, a.eps = eps;
  return few::by_tokens<few::kAdded>(a, tokens, x, weight, stream);
}
