// Arguments, shared-memory layout and routing alignment of the blockwise FP8 expert kernel (fp8_kernel.cuh).
#pragma once
#include "common/csrc/wgmma.cuh"

namespace moe {

using namespace ptx;

constexpr int kMaxExperts = 512;
constexpr int kMaxFusedPairs = 512;  // token-expert pairs that a block aligns by itself
constexpr int kTileRows = 128;       // of weights, by 128 columns of one byte
constexpr int kTileBytes = kTileRows * 128;
constexpr int kRing = 4;  // work items announced ahead

// A block's warps: one thread of the first requests weights, three fill the token operand, eight multiply, four may
// sum.
constexpr int kFillWarps = 3, kFillThreads = 32 * kFillWarps;
constexpr int kFirstMultiplyWarp = 1 + kFillWarps, kMultiplyWarps = 8, kMultiplyThreads = 32 * kMultiplyWarps;
constexpr int kFirstSumWarp = kFirstMultiplyWarp + kMultiplyWarps, kSumWarps = 4;
static_assert(kFirstMultiplyWarp % 4 == 0, "wgmma needs warpgroups: four warps from a multiple of four on");
static_assert(kMultiplyThreads == 2 * 128, "two warpgroups share an item's 256 rows");

// compute-sanitizer: memcheck and synccheck are clean. racecheck names pairs of a stage's scales, of the queue's or of
// the sums' ring, written by one warp and read by another: `full` and `empty` barriers order them, where one lane
// arrives for its warp after __syncwarp or an asynchronous copy arrives by itself, which it does not follow. initcheck
// names the pairs' outputs that the sums read: the copy engine wrote them, which it does not see.
// Plain C layout: the Python side fills the same structure through ctypes.
struct Fp8Args {
  const void* x;              // bf16 [T, H]
  const void* topk_ids;       // int64 or int32 [T, k], global expert indices; < 0: invalid
  const float* topk_weights;  // [T, k]; 0: skipped
  const int* expert_map;      // int32 [num_global] -> local expert or -1; may be null
  const void* w13;            // e4m3 [E, 2I, H], gate rows first
  const float* s13;           // [E, 2I/128, H/128]
  const void* w2;             // e4m3 [E, H, I]
  const float* s2;            // [E, H/128, I/128]
  void* out;                  // bf16 [T, H]
  void* xq;                   // e4m3 [T, H]             (prepared mode)
  float* xs;                  // [T, H/128]              (prepared mode)
  void* inter_q;              // e4m3 [T*k, I], by slot
  float* inter_s;             // [T*k, I/128]
  float* partial;             // split sums of the first stage
  void* contrib;              // fused: float32 [T*k, splits2, H]; prepared: bf16 [H/256, splits2, 2, T*k, 128], by slot
  int* ctrl;                  // claim, done, epoch; then flags
  int* flags;                 // [tiles, I/128]
  unsigned* count1;           // [tiles, I/128]
  unsigned* count2;           // fused: [T, H/256]; slabwise: [H/256]
  int4* tiles;                // {expert, first slot, tokens, 0}   (prepared mode)
  int* num_tiles;             // (prepared mode)
  int* sorted_pair;           // [T*k] slot -> pair                (prepared mode)
  int* pair_slot;             // [T*k] pair -> slot, or -1         (prepared mode)
  int tokens, top_k, experts, num_global, hidden, inter;
  int splits1, splits2, item_slabs, nmax, ids64, grid, fused, pdl;
};

// Prepared mode, bytes of the pairs' outputs if this device's experts get their share of the pairs.
__host__ __device__ inline size_t output_bytes(const Fp8Args& a) {
  return (size_t)a.tokens * a.top_k * a.experts / a.num_global * a.splits2 * a.hidden * 2;
}
constexpr size_t kCachedOutputBytes = 32 << 20;  // what the L2 keeps of them until a launch after this one sums them

// Prepared mode, tiles of so many tokens, or of twice as many that two blocks share (fp8_wide.cuh), and how many blocks
// of 128 columns of them a block of threads holds.
constexpr int kWideTokens = 128, kKeptSteps = 4;

// Prepared mode, tiles of up to kSlabwiseTokens: the main launch sums the outputs itself, slab after slab, where the L2
// would not hold them all.
constexpr int kSlabwiseTokens = 32;
__host__ __device__ inline bool sums_slabwise(const Fp8Args& a) {
  return a.nmax == kSlabwiseTokens && a.top_k * a.splits2 > 1 && output_bytes(a) > kCachedOutputBytes;
}
constexpr int main_threads(bool fused, int nmax) {
  return 32 * (kFirstSumWarp + (fused || nmax == kSlabwiseTokens ? kSumWarps : 0));
}

// What an earlier launch wrote, after this one's wait for it. Not __ldg: ld.global.nc asks for data that nobody writes
// while the kernel runs, and a launch that overlaps the one before it runs already then.
template <class T>
__device__ __forceinline__ T load_written(const T* p) {
  return *p;
}

__device__ __forceinline__ int local_expert(const Fp8Args& a, int pair) {
  long long id = a.ids64 ? static_cast<const long long*>(a.topk_ids)[pair] : static_cast<const int*>(a.topk_ids)[pair];
  const float weight = a.topk_weights[pair];  // before the test: both loads in flight together
  if (id < 0 || id >= a.num_global || weight == 0.f) return -1;
  int e = a.expert_map ? a.expert_map[id] : static_cast<int>(id);
  return (e >= 0 && e < a.experts) ? e : -1;
}

// What a block knows of the routing when it aligns by itself.
struct FusedRouting {
  float weight[kMaxFusedPairs];  // by slot
  unsigned short slot_pair[kMaxFusedPairs];
  unsigned short tile_expert[kMaxFusedPairs];
  unsigned short tile_start[kMaxFusedPairs];
  unsigned char tile_n[kMaxFusedPairs];
  unsigned char token_pairs[kMaxFusedPairs];  // valid pairs of each token
  unsigned char pair_valid[kMaxFusedPairs];
  int warp_sum[32];
  int num_tiles;
};

// Stable counting sort of at most 512 pairs by 512 threads. `scratch` is 16 x 512 bytes.
__device__ __forceinline__ void align_fused(const Fp8Args& a, FusedRouting& r, unsigned char* scratch, int nmax) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int pairs = a.tokens * a.top_k;
  for (int i = tid; i < 16 * kMaxExperts / 16; i += 512) reinterpret_cast<uint4*>(scratch)[i] = make_uint4(0, 0, 0, 0);
  if (tid < kMaxFusedPairs) r.token_pairs[tid] = 0;
  const int e = tid < pairs ? local_expert(a, tid) : -1;
  __syncthreads();
  if (tid < pairs) r.pair_valid[tid] = e >= 0;
  const unsigned same = __match_any_sync(0xffffffffu, e);
  const int rank_in_warp = __popc(same & ((1u << lane) - 1));
  if (e >= 0 && rank_in_warp == 0) scratch[warp * kMaxExperts + e] = __popc(same);
  __syncthreads();
  int n = 0;
  if (tid < a.experts)
#pragma unroll
    for (int w = 0; w < 16; ++w) n += scratch[w * kMaxExperts + tid];
  const int tiles = (n + nmax - 1) / nmax;
  int packed = n | (tiles << 16);
  int scan = packed;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    int v = __shfl_up_sync(0xffffffffu, scan, d);
    if (lane >= d) scan += v;
  }
  if (lane == 31) r.warp_sum[warp] = scan;
  if (tid < a.tokens) {
    int c = 0;
    for (int j = 0; j < a.top_k; ++j) c += r.pair_valid[tid * a.top_k + j];
    r.token_pairs[tid] = c;
  }
  __syncthreads();
  for (int w = 0; w < warp; ++w) scan += r.warp_sum[w];
  const int start = (scan - packed) & 0xffff;
  int tile = (scan - packed) >> 16;
  if (tid == 511) r.num_tiles = scan >> 16;
  int* slot_base = reinterpret_cast<int*>(scratch + 16 * kMaxExperts);
  slot_base[tid] = start;
  for (int i = 0; i < tiles; ++i, ++tile) {
    r.tile_expert[tile] = tid;
    r.tile_start[tile] = start + i * nmax;
    r.tile_n[tile] = min(nmax, n - i * nmax);
  }
  __syncthreads();
  if (e >= 0) {
    int slot = slot_base[e] + rank_in_warp;
    for (int w = 0; w < warp; ++w) slot += scratch[w * kMaxExperts + e];
    r.slot_pair[slot] = tid;
    r.weight[slot] = a.topk_weights[tid];
  }
}

template <bool FUSED>
struct Routing : FusedRouting {};
template <>
struct Routing<false> {};

// `group` is the 128-column group of the intermediate (stage 0) or the first 256-row slab (stage 1) of `slabs` slabs.
struct Item {
  int stage, tile, group, slabs, split, kb0, kb1;
};

template <int NMAX, int STAGES, bool FUSED>
struct Fp8Smem {
  static constexpr int kStagePitch = 144;  // bytes of one token's row while the intermediate is transposed
  alignas(1024) unsigned char w[STAGES][2 * kTileBytes];
  alignas(1024) unsigned char b[STAGES][NMAX * 128];
  alignas(16) float sb[STAGES][NMAX];
  alignas(8) float sw[STAGES][2];  // prepared mode: scales of the two weight blocks
  // What leaves through shared memory: the transposed intermediate, or each warpgroup's half of a slab of outputs.
  alignas(128) unsigned char stage_out[FUSED ? NMAX * kStagePitch : NMAX * 512];
  float red[8][NMAX];
  float col_scale[NMAX];
  alignas(16) float meta_w[NMAX];
  int meta_pair[NMAX];
  // full: the tokens' operand, and in prepared mode the weights too
  uint64_t weights_full[STAGES], full[STAGES], empty[STAGES];
  uint64_t item_full[kRing], item_empty[kRing], epi_full[kRing], epi_empty[kRing];
  int ring[kRing];
  Item ring_item[kRing];  // prepared mode: decoded by the thread that claims
  int4 ring_tile[kRing];
  int epi_tile[kRing], epi_slab[kRing];
  int last, epoch;
  Routing<FUSED> route;
};

}  // namespace moe
