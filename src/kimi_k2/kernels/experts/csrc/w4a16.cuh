// Arguments, shared memory, weight layout and work items of the kernel of four-bit experts (w4a16_kernel.cuh).
//
// Weights are stored in the order in which threads want them (kimi_k2.kernels.moe_w4a16_layout): a chunk is 256 rows by
// 128 columns, 16 KB; in it, for each 64-row tile and each half of the columns, thread t of a warpgroup finds 4 words
// at 16 t, one for each 16-column step, and the nibbles i and i + 4 of a word are register i of the left operand. The
// chunk's scales are for each tile, warp and row g of 8 the pairs (row g, row g + 8) of its groups. Row g of a
// first-stage tile is a gate row and g + 8 the same up row. Second-stage weights in bf16 have chunks of 32 columns.
#pragma once
#include "common/csrc/wgmma.cuh"
#include "fp8_item.cuh"
#include "w4a16_formats.cuh"

namespace w4a16 {

using namespace ptx;

using moe::Item;
using moe::kRing;

constexpr int kFillThreads = moe::kFillThreads;  // of tokens; of few in bf16, one warp

// Routing, scratch and sizes mean what they do in the FP8 kernel, except: w13, w2 are packed (w2 bf16 if w2_bf16), s13
// and s2 as w4a16_formats.cuh says, inter_q is bf16 [T*k, I] by slot or e4m3 records, xq is the sort's counters and
// inter_s its cursors (w4a16_prepare.cuh), xs holds the tokens' records (w4a16_records.cuh), and the prepared mode's
// tiles say last whether their expert has several and its contrib is bf16 [H/256, T*k, splits2, 256] by slot, weighed
// only if top_k is 1.
struct Args : moe::Fp8Args {
  const float* all13;  // of NVFP4: [E, 2I], the scale of all of gate a row of it, then that of up
  const float* all2;   // [E, H], that of down
  int w2_bf16;         // second-stage weights are bf16
  int in_flight;       // chunks of weights that a block may have requested and not yet received
  int unpaired;        // no sum depends on how many tokens share an expert (w4a16_records.cuh), nor on `fused`
  int most_items;      // up to so many first-stage items, where few experts are chosen, its sums are in more parts
  int inner;           // parts of the first stage's sums within an item, where its items are not parts themselves
  int divides;         // the scales of all divide
};

// Fused mode, unpaired: parts are rounded and weighed as sum_kernel and what is before it do.
__device__ __forceinline__ bool weighed_in_sum(const Args& a) { return a.unpaired && a.top_k > 1; }

constexpr int kMostSplits = 8;

// Parts of the first stage's sums. Few tiles have too few items for all SMs.
__device__ __forceinline__ int first_splits(const Args& a, int tiles) {
  const int cells = tiles * (a.inter / 128);
  int splits = a.splits1;
  const int most = min(kMostSplits, a.hidden / 128);
  while (2 * splits <= most && 2 * splits * cells <= a.most_items) splits *= 2;
  return splits;
}

template <class F, int NMAX_, int STAGES_, int WARPGROUPS_, bool FUSED_, bool W2_BF16_, bool INNER_ = false>
struct Config {
  using Format = F;
  static constexpr int SPLIT = F::GROUP == 16 ? 2 : 1;  // parts of 32 columns with scales of their own
  static constexpr int NMAX = NMAX_, STAGES = STAGES_, WARPGROUPS = WARPGROUPS_;
  static constexpr bool FUSED = FUSED_, W2_BF16 = W2_BF16_, INNER = INNER_;  // INNER: see Args
  static constexpr int TILES = 4 / WARPGROUPS;                               // 64-row tiles of a warpgroup
  static constexpr int CONSUMERS = 128 * WARPGROUPS;
  static constexpr bool FEW = NMAX <= 32;         // tokens: one lane each can request them
  static constexpr bool E4M3 = FEW && !W2_BF16;   // see w4a16_e4m3.cuh
  static constexpr bool ROWS = FEW && W2_BF16;    // tokens as rows of bf16, requested by one warp
  static constexpr int PITCH = ROWS ? 272 : 256;  // bytes of a token's 128 columns in shared memory
  static constexpr int THREADS = 128 + CONSUMERS + (FUSED ? 128 : 0);
};

constexpr int kRecord = 288;  // bytes of a token's 128 columns as e4m3 values, offsets and a factor: w4a16_records.cuh

template <class C>
struct Smem {
  // Tokens. Few in bf16: a row each. Many: two halves of 64 columns, rows of 128 bytes, swizzled; so are e4m3's upper
  // and lower values.
  alignas(1024) unsigned char b[C::STAGES][C::NMAX * C::PITCH];
  alignas(128) unsigned char w[C::STAGES][kChunkBytes];
  alignas(128) unsigned char scale[C::STAGES][kScaleBytes<typename C::Format>];
  static constexpr int CODED = C::E4M3 ? C::NMAX : 1;  // tokens as records
  alignas(128) unsigned char offset[C::E4M3 ? C::STAGES : 1][CODED * 16];
  float factor[C::E4M3 ? C::STAGES : 1][CODED];
  int held[C::E4M3 ? C::STAGES : 1];                            // tokens that a stage held last, negative if paired
  float exchange[C::E4M3 ? 2 : 1][C::E4M3 ? C::NMAX : 1][128];  // sums that one warpgroup has for the other's rows
  alignas(16) unsigned char records[CODED][256];                // values of an item's intermediate on their way out
  unsigned amax[CODED];                                         // of its float32 values, as bits
  int sums[CODED][4];  // of its values, a group of 32 columns each; zero between items
  uint64_t weights_full[C::STAGES], full[C::STAGES], empty[C::STAGES];  // full: the tokens' operand
  uint64_t item_full[kRing], item_empty[kRing], epi_full[kRing], epi_empty[kRing];
  int ring[kRing];
  int epi_tile[kRing], epi_slab[kRing];
  int last, epoch;
  int splits1;  // before the first item is announced
  moe::Routing<C::FUSED> route;
};

// `group` and `slabs` count row blocks, kb0 to kb1 column chunks.
template <class C>
__device__ __forceinline__ Item decode_item(const Args& a, const Smem<C>& s, int item, int tiles) {
  const int groups = a.inter / 128, slabs = a.hidden / 256, splits1 = C::FEW ? s.splits1 : 1;
  const int first = tiles * groups * splits1;
  Item r;
  r.stage = item >= first;
  if (r.stage) item -= first;
  const int splits = r.stage ? a.splits2 : splits1;
  const int chunks = r.stage ? a.inter / (C::W2_BF16 ? 32 : 128) : a.hidden / 128;
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

// silu(gate) * up in bf16 from sums of gate rows g, then up rows g, of tokens 8j + 2q and 8j + 2q + 1, times `factor`:
// token 8j + g, rows 2q and 2q + 1.
__device__ __forceinline__ uint32_t activate(const float* d, float factor = 1.f) {
  const float gate[2] = {d[0] * factor, d[1] * factor}, up[2] = {d[2] * factor, d[3] * factor};
  return transpose_8x8(pack_bf16(__fdividef(gate[0], 1.f + __expf(-gate[0])) * up[0],
                                 __fdividef(gate[1], 1.f + __expf(-gate[1])) * up[1]));
}

}  // namespace w4a16
