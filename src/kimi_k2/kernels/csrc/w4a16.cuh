// Arguments, shared memory, weight layout and work items of the INT4 expert kernel (w4a16.cu).
//
// Weights are stored in the order in which threads want them (kimi_k2.kernels.moe_w4a16_layout): a chunk is 256 rows by
// 128 columns, 16 KB; in it, for each 64-row tile and each half of the columns, thread t of a warpgroup finds 4 words
// at 16 t, one for each 16-column step, and the nibbles i and i + 4 of a word are register i of the left operand. The
// chunk's scales are 2 KB: for each tile, warp and row g of 8, the pairs (row g, row g + 8) of its 4 groups. Row g of a
// first-stage tile is a gate row and g + 8 the same up row. Second-stage weights in bf16 have chunks of 32 columns.
#pragma once
#include "moe_fp8_item.cuh"
#include "w4a16_wgmma.cuh"

namespace w4a16 {

using moe::Item;
using moe::kRing;

constexpr int kChunkBytes = 16384;
constexpr int kScaleBytes = 2048;
constexpr int kFillThreads = 96;  // of many tokens; of few, one warp

// Routing, scratch and sizes mean what they do in the FP8 kernel, except: w13, w2 are packed int4 (w2 bf16 if w2_bf16),
// s13 and s2 are bf16, inter_q is bf16 [T*k, I], xq is the sort's scratch, and xs and inter_s are unused.
struct Args : moe::Fp8Args {
  int w2_bf16;    // second-stage weights are bf16
  int in_flight;  // chunks of weights that a block may have requested and not yet received
};

template <int NMAX_, int STAGES_, int WARPGROUPS_, bool FUSED_, bool W2_BF16_>
struct Config {
  static constexpr int NMAX = NMAX_, STAGES = STAGES_, WARPGROUPS = WARPGROUPS_;
  static constexpr bool FUSED = FUSED_, W2_BF16 = W2_BF16_;
  static constexpr int TILES = 4 / WARPGROUPS;            // 64-row tiles of a warpgroup
  static constexpr int CONSUMERS = 128 * WARPGROUPS;
  static constexpr bool FEW = NMAX <= 32;                 // tokens: one lane each can request them
  static constexpr bool E4M3 = FEW && !W2_BF16;           // see w4a16_e4m3.cuh
  static constexpr bool ROWS = FEW && W2_BF16;            // tokens as rows of bf16, requested by one warp
  static constexpr int PITCH = ROWS ? 272 : 256;          // bytes of a token's 128 columns in shared memory
  static constexpr int THREADS = 128 + CONSUMERS + (FUSED ? 128 : 0);
};

constexpr int kRecord = 288;      // bytes of a token's 128 columns as e4m3 codes and factors: w4a16_e4m3.cuh
constexpr int kFactorPitch = 12;  // floats of its factors in shared memory, where two lanes never meet a bank

template <class C>
struct Smem {
  // Tokens. Few in bf16: a row each. Many: two halves of 64 columns, rows of 128 bytes, swizzled; so are e4m3's upper
  // and lower codes.
  alignas(1024) unsigned char b[C::STAGES][C::NMAX * C::PITCH];
  alignas(128) unsigned char w[C::STAGES][kChunkBytes];
  alignas(128) unsigned char scale[C::STAGES][kScaleBytes];
  alignas(16) float meta_w[kRing][C::NMAX];  // prepared mode: weight and pair of each token of an item
  int meta_pair[kRing][C::NMAX];
  unsigned row[2][C::FEW ? 1 : C::NMAX];  // source row of each token of the item being filled
  static constexpr int CODED = C::E4M3 ? C::NMAX : 1;  // tokens as records
  alignas(16) float factor[C::E4M3 ? C::STAGES : 1][CODED][kFactorPitch];
  float exchange[C::E4M3 ? 2 : 1][C::E4M3 ? C::NMAX : 1][128];  // sums that one warpgroup has for the other's rows
  alignas(16) unsigned char records[CODED][256];  // codes of an item's intermediate on their way out
  unsigned amax[CODED];                           // of its float32 values, as bits
  int sums[CODED][4];                             // of its codes, a group of 32 columns each; zero between items
  uint64_t weights_full[C::STAGES], full[C::STAGES], empty[C::STAGES];  // full: the tokens' operand
  uint64_t item_full[kRing], item_empty[kRing], epi_full[kRing], epi_empty[kRing];
  int ring[kRing];
  int epi_tile[kRing], epi_slab[kRing];
  int last, epoch;
  moe::Routing<C::FUSED> route;
};

// `group` and `slabs` count row blocks, kb0 to kb1 column chunks.
template <bool W2_BF16>
__device__ __forceinline__ Item decode_item(const Args& a, int item, int tiles) {
  const int groups = a.inter / 128, slabs = a.hidden / 256;
  const int first = tiles * groups * a.splits1;
  Item r;
  r.stage = item >= first;
  if (r.stage) item -= first;
  const int splits = r.stage ? a.splits2 : a.splits1;
  const int chunks = r.stage ? a.inter / (W2_BF16 ? 32 : 128) : a.hidden / 128;
  r.slabs = r.stage ? a.item_slabs : 1;
  r.split = item % splits;
  item /= splits;
  const int per_tile = r.stage ? slabs / a.item_slabs : groups;
  r.group = item % per_tile * r.slabs;
  r.tile = item / per_tile;
  r.kb0 = r.split * chunks / splits;
  r.kb1 = (r.split + 1) * chunks / splits;
  return r;
}

__device__ __forceinline__ void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          moe::smem_u32(dst)),
      "l"(src), "r"(bytes), "r"(moe::smem_u32(bar)), "l"(policy)
      : "memory");
}
// Orders ordinary accesses of global memory with those of the copy engine.
__device__ __forceinline__ void fence_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// The barrier counts this thread once its asynchronous copies so far have landed.
__device__ __forceinline__ void arrive_after_copies(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(moe::smem_u32(bar)) : "memory");
}
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// silu(gate) * up in bf16 from sums of gate rows g, then up rows g, of tokens 8j + 2q and 8j + 2q + 1: token 8j + g, rows 2q
// and 2q + 1.
__device__ __forceinline__ uint32_t activate(const float* d) {
  return transpose_8x8(moe::pack_bf16(d[0] / (1.f + __expf(-d[0])) * d[2], d[1] / (1.f + __expf(-d[1])) * d[3]));
}

// Both constants of the unpacking, hidden in registers: one instruction takes only one of them as an immediate.
struct Unpack {
  uint32_t mask, one;
  __device__ __forceinline__ Unpack() {
    asm volatile("mov.b32 %0, 0x000F000F;" : "=r"(mask));
    asm volatile("mov.b32 %0, 0x43004300;" : "=r"(one));
  }
  // One word is 8 weights of rows g and g + 8; `scales` holds the scale of row g in its low half and of g + 8 in its
  // high. bf16 128 + stored and its difference to 136 are exact; the product is rounded.
  __device__ __forceinline__ void operator()(uint32_t (&a)[4], uint32_t word, __nv_bfloat162 scales) const {
    const __nv_bfloat162 scale[2] = {__low2bfloat162(scales), __high2bfloat162(scales)};
    const uint32_t offset = 0x43084308u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t biased;
      asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(biased) : "r"(word >> (4 * i)), "r"(mask), "r"(one));
      const __nv_bfloat162 v = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&biased),
                                       *reinterpret_cast<const __nv_bfloat162*>(&offset));
      const __nv_bfloat162 d = __hmul2(v, scale[i & 1]);
      a[i] = *reinterpret_cast<const uint32_t*>(&d);
    }
  }
};

}  // namespace w4a16
