// Blockwise FP8 experts for many tokens an expert: a launch a stage, in tiles of 128 tokens by 256 rows of weights.
//
// Here the tokens are the 64-row operand of the tensor cores, 64 of them a warpgroup, and 128 rows of weights the wide
// one: of shared memory, 6 KB are read for 64 x 128 x 32 products, where fp8_multiply.cuh's form takes 8; a thread has
// two tokens, so that one factor scales half of its sums; and a token's values lie in four lanes. While one warpgroup
// adds a block of 128 columns to its sums, the other multiplies.
//
// What limits it is the way from the L2 to shared memory: 48 KB for 128 columns of a tile. Several tiles read an
// expert's weights, which the L2 therefore keeps; and with CLUSTER = 2 a pair of blocks shares them: each requests one
// half and has the copy engine bring it to both, which leaves 32 KB. There a second stage of at most two blocks of
// columns is `KEPT`: an item's tokens stay for all its slabs, and its outputs, of which it has most, leave by two
// buffers.
#pragma once
#include "common/csrc/copy.cuh"
#include "common/csrc/decode_ptx.cuh"
#include "fp8_fill.cuh"

namespace moe {

constexpr int kWideThreads = 32 * kFirstSumWarp;

template <bool KEPT>
struct WideSmem {
  static constexpr int kStages = KEPT ? 3 : 4, kBuffers = KEPT ? 2 : 1;
  alignas(1024) unsigned char w[kStages][2 * kTileBytes];
  alignas(1024) unsigned char b[kKeptSteps][kWideTokens * 128];
  alignas(256) unsigned char staged[kMultiplyWarps][kBuffers][16 * 256];  // a warp's 16 tokens on their way out
  alignas(16) float sb[kKeptSteps][kWideTokens];
  alignas(8) float sw[kStages][2];
  uint64_t full[kStages], empty[kStages];
};

// Items of a launch: a tile's groups, or its slabs, follow each other.
template <int STAGE>
__device__ __forceinline__ int wide_items(const Fp8Args& a) {
  return *a.num_tiles * (STAGE == 0 ? a.inter / 128 : a.hidden / 256 / a.item_slabs * a.splits2);
}
template <int STAGE>
__device__ __forceinline__ Item wide_item(const Fp8Args& a, int item) {
  const int groups = a.inter / 128;
  if (STAGE == 0) return {0, item / groups, item % groups, 1, 0, 0, a.hidden / 128};
  const int split = item % a.splits2, t = item / a.splits2, per_tile = a.hidden / 256 / a.item_slabs;
  return {1,
          t / per_tile,
          t % per_tile * a.item_slabs,
          a.item_slabs,
          split,
          split * groups / a.splits2,
          (split + 1) * groups / a.splits2};
}

// A block's share of a tile: of few tokens, one warpgroup's in each block.
template <int CLUSTER>
__device__ __forceinline__ int4 wide_share(int4 tile, int rank) {
  if (CLUSTER == 1) return tile;
  const int cut = tile.z > kWideTokens ? kWideTokens : kWideTokens / 2;
  return rank == 0 ? make_int4(tile.x, tile.y, min(tile.z, cut), 0)
                   : make_int4(tile.x, tile.y + cut, max(0, tile.z - cut), 0);
}

// One thread: an item's weights into the ring.
template <int CLUSTER, class S>
__device__ __forceinline__ void feed_wide(const Fp8Args& a, S& s, const CUtensorMap& map, const Item it, int expert,
                                          int rank, int& seq) {
  const int row0 = it.stage == 0 ? expert * 2 * a.inter + it.group * 128 : expert * a.hidden + it.group * 256;
  const int gap = it.stage == 0 ? a.inter : 128;
  for (int slab = 0; slab < it.slabs; ++slab)
    for (int kb = it.kb0; kb < it.kb1; ++kb, ++seq) {
      const int st = seq % S::kStages, row = row0 + slab * 256;
      if (seq >= S::kStages) mbar_wait(&s.empty[st], ((seq / S::kStages) - 1) & 1);
      mbar_arrive_expect_tx(&s.full[st], 2 * kTileBytes);
      const uint32_t dst = smem_u32(s.w[st]);
      if constexpr (CLUSTER == 1) {
        tma_load_2d(dst, &map, &s.full[st], kb * 128, row, kEvictNormal);
        tma_load_2d(dst + kTileBytes, &map, &s.full[st], kb * 128, row + gap, kEvictNormal);
      } else {
        tma_load_2d_multicast(dst + rank * kTileBytes, &map, &s.full[st], kb * 128, row + rank * gap, 3, kEvictNormal);
      }
    }
}

// A lane has tokens g and g + 8 of its warp's 16: acc[half][4 j + i] and [4 j + 2 + i] are of row 8 j + 2 q + i.
using WideSums = float[2][64];

// First stage: silu(gate) * up of a warp's 16 tokens, 128 values each, in e4m3 with a scale a token.
__device__ __forceinline__ void store_wide_intermediate(const Fp8Args& a, unsigned char* staged, const Item it,
                                                        int slot, int count, WideSums& acc) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, groups = a.inter / 128;
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[0][i] = __fdividef(acc[0][i], 1.f + __expf(-acc[0][i])) * acc[1][i];
  __syncwarp();  // the item before has left
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = 0.f;
#pragma unroll
    for (int j = 0; j < 16; ++j) m = fmaxf(m, fmaxf(fabsf(acc[0][4 * j + 2 * r]), fabsf(acc[0][4 * j + 2 * r + 1])));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    const float scale = group_scale(m), inv = 1.f / scale;
    const int token = g + 8 * r;
    if (q == 0 && token < count) a.inter_s[(size_t)(slot + token) * groups + it.group] = scale;
    // 16-byte units are permuted so that no two lanes write one bank.
#pragma unroll
    for (int j = 0; j < 16; ++j)
      *reinterpret_cast<uint16_t*>(staged + token * 128 + ((j >> 1) ^ g) * 16 + (j & 1) * 8 + 2 * q) =
          to_e4m3(acc[0][4 * j + 2 * r] * inv, acc[0][4 * j + 2 * r + 1] * inv);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = i * 4 + (lane >> 3), unit = lane & 7;
    if (token < count)
      *reinterpret_cast<uint4*>(static_cast<unsigned char*>(a.inter_q) + (size_t)(slot + token) * a.inter +
                                it.group * 128 + unit * 16) =
          *reinterpret_cast<const uint4*>(staged + token * 128 + (unit ^ (token & 7)) * 16);
  }
}

// Second stage: a slab of a warp's 16 tokens' outputs, as they are or, where no sum follows, weighted.
template <int BUFFERS>
__device__ __forceinline__ void store_wide_outputs(const Fp8Args& a, unsigned char (*buffers)[16 * 256], const Item it,
                                                   int slot, int count, WideSums& acc) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
  const bool direct = a.top_k * a.splits2 == 1;
  float weight[2] = {1.f, 1.f};
  if (direct)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (g + 8 * r < count) weight[r] = load_written(a.topk_weights + load_written(a.sorted_pair + slot + g + 8 * r));
  const int row = (lane & 7) + ((lane >> 3) & 1) * 8;  // whose 16 bytes of a matrix this lane addresses
  const uint32_t put0 = smem_u32(buffers[0]) + row * 256 + (((lane >> 4) ^ wide_unit(0, slot + row)) << 4);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    unsigned char* staged = buffers[m % BUFFERS];
    const uint32_t put = put0 + m % BUFFERS * (16 * 256);
    if (lane == 0) bulk_wait_read<BUFFERS - 1>();  // the copy of the half before, or the one before it
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 16; j += 2)
      stmatrix_x4(put ^ (j << 4), pack_bf16(acc[m][4 * j] * weight[0], acc[m][4 * j + 1] * weight[0]),
                  pack_bf16(acc[m][4 * j + 2] * weight[1], acc[m][4 * j + 3] * weight[1]),
                  pack_bf16(acc[m][4 * j + 4] * weight[0], acc[m][4 * j + 5] * weight[0]),
                  pack_bf16(acc[m][4 * j + 6] * weight[1], acc[m][4 * j + 7] * weight[1]));
    if (direct) {
      __syncwarp();
      for (int c = lane; c < count * 16; c += 32) {
        const int token = c >> 4, unit = c & 15, pair = load_written(a.sorted_pair + slot + token);
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.out) + (size_t)pair * a.hidden + it.group * 256 +
                                  m * 128 + unit * 8) =
            *reinterpret_cast<const uint4*>(staged + token * 256 + wide_unit(unit, slot + token) * 16);
      }
    } else {
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        const size_t place = (size_t)((it.group * a.splits2 + it.split) * 2 + m) * a.tokens * a.top_k + slot;
        bulk_store(static_cast<__nv_bfloat16*>(a.contrib) + place * 128, smem_u32(staged), count * 256);
        bulk_commit();
      }
    }
  }
}

// One group or slab, by one of the two warpgroups.
template <int CLUSTER, int STAGE, bool KEPT>
__device__ __forceinline__ void multiply_wide(const Fp8Args& a, WideSmem<KEPT>& s, const Item it, const int4 tile,
                                              int& seq, int first) {
  using S = WideSmem<KEPT>;
  const int warp = threadIdx.x / 32 - kFirstMultiplyWarp, lane = threadIdx.x & 31;
  const int wg = __shfl_sync(0xffffffffu, warp / 4, 0), token = warp * 16 + (lane >> 2), end = seq + it.kb1 - it.kb0;
  auto release = [&](int st) {
    __syncwarp();
    if (CLUSTER == 1 && lane == 0) mbar_arrive(&s.empty[st]);
    if (CLUSTER > 1 && lane < CLUSTER) mbar_arrive_at(&s.empty[st], lane);
  };
  if (wg * 64 >= tile.z) {  // no tokens of this warpgroup's
    for (; seq < end; ++seq) {
      mbar_wait(&s.full[seq % S::kStages], (seq / S::kStages) & 1);
      release(seq % S::kStages);
    }
    return;
  }
  WideSums acc;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[m][i] = 0.f;
  const uint64_t left0 = desc_sw128(smem_u32(s.b[0]) + wg * 8192), right0 = desc_sw128(smem_u32(s.w[0]));
  for (int step = 0; seq < end; ++seq, ++step) {
    const int st = __shfl_sync(0xffffffffu, seq % S::kStages, 0);
    const int at = KEPT ? __shfl_sync(0xffffffffu, (first + step) % kKeptSteps, 0) : st;
    mbar_wait(&s.full[st], (seq / S::kStages) & 1);
    fence_proxy_async();  // the tokens came by ordinary copies, and the tensor cores read them
    const uint64_t left = left0 + at * (kWideTokens * 128 >> 4), right = right0 + st * (2 * kTileBytes >> 4);
    const float c0 = s.sb[at][token], c1 = s.sb[at][token + 8];
    const float2 w = *reinterpret_cast<const float2*>(s.sw[st]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float t[64];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) WgmmaE4m3<128>::go(t, left + 2 * k, right + m * (kTileBytes >> 4) + 2 * k, k > 0);
      wgmma_commit();
      wgmma_wait<0>();
      fence_regs(t);
      if (m == 1) release(st);
      const float s0 = c0 * (m ? w.y : w.x), s1 = c1 * (m ? w.y : w.x);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        acc[m][4 * j] += t[4 * j] * s0;
        acc[m][4 * j + 1] += t[4 * j + 1] * s0;
        acc[m][4 * j + 2] += t[4 * j + 2] * s1;
        acc[m][4 * j + 3] += t[4 * j + 3] * s1;
      }
    }
  }
  const int count = min(16, tile.z - warp * 16);
  if (count <= 0) return;
  if (STAGE == 0) store_wide_intermediate(a, s.staged[warp][0], it, tile.y + warp * 16, count, acc);
  else store_wide_outputs<S::kBuffers>(a, s.staged[warp], it, tile.y + warp * 16, count, acc);
}

template <int CLUSTER, int STAGE, bool KEPT>
__global__ void __launch_bounds__(kWideThreads, 1)
    moe_fp8_wide_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Fp8Args a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  using S = WideSmem<KEPT>;
  S& s = *reinterpret_cast<S*>(raw);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, rank = blockIdx.x % CLUSTER;
  if (tid == 0) {
    if (smem_u32(raw) & 1023) __trap();
    prefetch_tensormap(&map);
    for (int i = 0; i < S::kStages; ++i) {
      mbar_init(&s.full[i], 1 + kFillThreads);  // the weights, and each thread's copies
      mbar_init(&s.empty[i], CLUSTER * kMultiplyWarps);
    }
    fence_mbar_init();
  }
  if (a.pdl) {
    pdl_launch();
    pdl_wait();
  }
  if (CLUSTER > 1) {
    decode::cluster_arrive();
    decode::cluster_wait();
  } else {
    __syncthreads();
  }
  const int total = wide_items<STAGE>(a), step = gridDim.x / CLUSTER;
  int seq = 0, first = 0;
  auto each = [&](auto&& work) {
    int item = blockIdx.x / CLUSTER;
    if (item >= total) return;
    int4 ahead = load_written(a.tiles + wide_item<STAGE>(a, item).tile);
    for (; item < total; item += step) {
      const int4 tile = ahead;
      if (item + step < total) ahead = load_written(a.tiles + wide_item<STAGE>(a, item + step).tile);
      const Item it = wide_item<STAGE>(a, item);
      work(it, wide_share<CLUSTER>(tile, rank));
      first += it.kb1 - it.kb0;
    }
  };
  if (warp < kFirstMultiplyWarp) {
    reg_dealloc<56>();
    if (warp > 0)
      each([&](const Item& it, const int4& tile) {
        fill_item<kWideTokens, S::kStages, KEPT>(a, s, it, tile, seq, first);
      });
    else if (lane == 0)
      each([&](const Item& it, const int4& tile) { feed_wide<CLUSTER>(a, s, map, it, tile.x, rank, seq); });
  } else {
    reg_alloc<224>();
    each([&](Item it, const int4& tile) {
      for (int slab = 0; slab < it.slabs; ++slab, ++it.group) multiply_wide<CLUSTER, STAGE>(a, s, it, tile, seq, first);
    });
    if (STAGE == 1 && lane == 0) bulk_wait();
  }
  if (CLUSTER > 1) {  // no block ends while the other brings it weights or reports to it
    decode::cluster_arrive();
    decode::cluster_wait();
  }
}

}  // namespace moe
