// block_gemm.cuh's GEMM of one token, bit for bit (few.cuh says how), of bf16 values, which every block quantizes in
// two terms itself, or of what quantize.cu has made of them. A block takes some rows of W, which it asks for before it
// waits for the launch before it.
#include "common/csrc/decode.cuh"
#include "common/csrc/few.cuh"

namespace few {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kEach = 4;        // groups of eight of the token's values a thread
constexpr int kMostUnits = 16;  // of a block

struct GemmArguments {
  const __nv_bfloat16* x;     // [columns], or null
  const float* token_scale;   // else [columns / 128], scale_stride values apart, of e4m3 [2, columns]
  const float* weight_scale;  // [ceil(rows / 128), columns / 128]
  __nv_bfloat16* out;         // [rows]
  int scale_stride, rows, columns;
  int parts;  // of the columns, summed apart
  int tiles;  // of eight rows, a block
};

struct Sizes {
  int stages, units, kept;  // of eight blocks of columns; of a tile and a stage; rows of a block
  __host__ __device__ Sizes(const GemmArguments& a)
      : stages((a.columns / 128 + 7) / 8), units(stages * a.tiles), kept(8 * a.tiles) {}
};

struct GemmMemory {
  float factor[64];  // by block of columns
  alignas(8) uint64_t full[kMostUnits], token;
  // Before this [2][stages] atoms of the token, then [units] of W; behind it the sums [blocks of columns][kept].
  __host__ __device__ static int before(const Sizes& s) { return 2 * s.stages * kAtomBytes + s.units * kUnitBytes; }
  static size_t bytes(const Sizes& s, int columns) {
    return before(s) + sizeof(GemmMemory) + size_t(columns / 128) * s.kept * 4;
  }
};

// The token, quantized: a warp has two blocks of columns at a time.
__device__ __forceinline__ void quantize_token(const GemmArguments& a, GemmMemory& m, unsigned char* token,
                                               const Sizes& sizes, const float* scales) {
  const int groups = a.columns / 8;
  uint4 value[kEach];
  float scale[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int v = threadIdx.x + i * kThreads;
    scale[i] = v < groups ? __ldg(scales + v / 16) : 0.f;
  }
  decode::pdl_wait();
  decode::pdl_launch();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int v = threadIdx.x + i * kThreads;
    value[i] = v < groups ? __ldcg(reinterpret_cast<const uint4*>(a.x) + v) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int v = threadIdx.x + i * kThreads, block = v / 16;
    if (i * kThreads >= groups) break;
    float x[8], token_scale;
    decode::widen(value[i], x);
    const uint2 fp8 = quantize_eight(x, token_scale), rest = quantize_rest(x, token_scale, fp8);
    if (v >= groups) continue;
    unsigned char* const to = token + block / 8 * kAtomBytes + place_of(block, v % 16);
    *reinterpret_cast<uint2*>(to) = fp8;
    *reinterpret_cast<uint2*>(to + sizes.stages * kAtomBytes) = rest;
    if (v % 16 == 0) m.factor[block] = token_scale * scale[i];
  }
  fence_proxy_async();
}

template <bool QUANTIZED>
__global__ void __launch_bounds__(kThreads, 2)
    few_gemm(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap quantized,
             const __grid_constant__ GemmArguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const Sizes sizes(a);
  unsigned char *const token = raw, *const w = raw + 2 * sizes.stages * kAtomBytes;
  GemmMemory& m = *reinterpret_cast<GemmMemory*>(raw + GemmMemory::before(sizes));
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
  if constexpr (QUANTIZED) {
    const float scale = thread < blocks ? __ldg(scales + thread) : 0.f;
    decode::pdl_wait();
    decode::pdl_launch();
    if (thread == 0) {
      mbar_arrive_expect_tx(&m.token, 2 * a.columns);
      for (int term = 0; term < 2; ++term)
        tma_load_2d(smem_u32(token + term * sizes.stages * kAtomBytes), &quantized, &m.token, 0, term * blocks,
                    kEvictNormal);
    }
    if (thread < blocks) m.factor[thread] = __ldcg(a.token_scale + thread * a.scale_stride) * scale;
    __syncthreads();
    mbar_wait(&m.token, 0);
  } else {
    quantize_token(a, m, token, sizes, scales);
    __syncthreads();
  }

  // Warpgroups take turns with the units. A turn too many repeats the last one: a branch would have the compiler
  // serialize the instructions.
  constexpr int kTurns = 2;
  for (int base = group; base < sizes.units; base += 2 * kTurns) {
    float sum[kTurns][4];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int unit = min(base + 2 * i, sizes.units - 1), stage = unit / a.tiles;
      mbar_wait(&m.full[unit], 0);
      wgmma_fence();
#pragma unroll
      for (int term = 0; term < 2; ++term)
        multiply(sum[i], w + unit * kUnitBytes, token + (term * sizes.stages + stage) * kAtomBytes, term > 0);
      wgmma_commit();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kTurns; ++i) fence_regs(sum[i]);
    const int column = lane / 4;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int unit = base + 2 * i, block = unit / a.tiles * 8 + column;
      float two[2];
      if (unit >= sizes.units || block >= blocks || !pick(sum[i], column, two)) continue;
      *reinterpret_cast<float2*>(product + block * sizes.kept + unit % a.tiles * 8 + warp % 4 * 2) =
          make_float2(two[0], two[1]);
    }
  }
  __syncthreads();
  if (thread < sizes.kept && first + thread < a.rows)
    a.out[first + thread] = __float2bfloat16(sum_parts(product + thread, sizes.kept, m.factor, 1, blocks, a.parts));
}

}  // namespace few

// x is bf16 [columns] or, with its scales, e4m3 [2, columns].
extern "C" int kimi_few_gemm(const void* x, const void* token_scale, const void* weight, const void* weight_scale,
                             void* out, int scale_stride, int rows, int columns, int parts, int tiles, void* stream) {
  const few::GemmArguments a{static_cast<const __nv_bfloat16*>(token_scale == nullptr ? x : nullptr),
                             static_cast<const float*>(token_scale),
                             static_cast<const float*>(weight_scale),
                             static_cast<__nv_bfloat16*>(out),
                             scale_stride,
                             rows,
                             columns,
                             parts,
                             tiles};
  const few::Sizes sizes(a);
  const size_t bytes = few::GemmMemory::bytes(sizes, columns);
  if (128 % sizes.kept || sizes.units > few::kMostUnits || columns > 8 * few::kEach * few::kThreads ||
      bytes > host::kMaxShared)
    return host::kNoInstance;
  CUtensorMap weights, quantized;
  if (int rc = host::encode_blocks(&weights, weight, columns, rows, 8, 8)) return rc;
  quantized = weights;
  const int blocks = columns / 128;
  if (token_scale != nullptr)
    if (int rc = host::encode_rows(&quantized, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, x, 128, 2 * blocks, blocks)) return rc;
  const auto kernel = token_scale != nullptr ? few::few_gemm<true> : few::few_gemm<false>;
  const dim3 grid((rows + sizes.kept - 1) / sizes.kept);
  return host::launch(kernel,
                      {grid, few::kThreads, bytes, static_cast<cudaStream_t>(stream), true, 1, host::kWholeShare},
                      weights, quantized, a);
}
