// INT4 experts of a few tokens, bit for bit what w4a16_kernel.cuh makes of them unfused in e4m3 and unpaired
// (w4a16_e4m3.cuh), one token-expert pair at a time in two launches: 64 rows of gate and up of a part of the columns a
// block, then 64 output rows of all the token's experts.
//
// There a warpgroup adds up every other block of 128 columns, and both sums make a part's. So does one here. What is
// one column of a matrix instruction's eight there is its first one here: row after row of the right operand lies a
// block of columns further, and what the other seven columns come to nobody reads.
#include "routing.cuh"
#include "w4a16_few_shared.cuh"
#include "w4a16_records.cuh"

namespace w4a16 {

using decode::kAll;

constexpr int kTileWords = 4096, kScales = kTileScales<Int4>,
              kTileBytes = kTileWords + kScales;  // of 64 rows, 128 columns
constexpr int kUpThreads = 256;
constexpr int kMostBlocks = 64;  // of 128 columns, that a launch's block multiplies
constexpr int kPitch = (kMostBlocks + 8) * 16;

struct FewArguments {
  const __nv_bfloat16* x;        // [tokens, hidden]
  const void* topk_indices;      // int64 or int32 [tokens, top_k]; < 0: invalid
  const float* topk_weights;     // [tokens, top_k]; 0: skipped
  const int* expert_map;         // [num_global] to the local expert or -1; may be null
  const unsigned char* gate_up;  // in chunks, see w4a16.cuh
  const unsigned char* gate_up_scale;
  const unsigned char* down;
  const unsigned char* down_scale;
  __nv_bfloat16* intermediate;          // [tokens, top_k, inter]
  __nv_bfloat16* out;                   // [tokens, hidden]
  const __nv_bfloat16* shared_gate_up;  // [2 * shared_inter, hidden], or null
  const __nv_bfloat16* shared_down;     // [hidden, shared_inter]
  __nv_bfloat16* shared_intermediate;   // [tokens, shared_inter]
  int tokens, top_k, experts, num_global, hidden, inter, ids64;
  int splits;                     // of the first launch's columns, summed apart: the blocks of a cluster
  int ring;                       // tiles that a warpgroup of the first launch has room for
  int shared_inter, shared_ring;  // of the shared expert; 0: there is none
};

__device__ __host__ __forceinline__ SharedArguments shared_of(const FewArguments& a) {
  return {a.x, a.shared_intermediate, a.tokens, a.hidden, a.shared_inter, a.shared_ring};
}

// Blocks of 128 columns as records (w4a16_records.cuh): of a right operand of e4m3 or bf16 the block's row is 16 bytes.
struct Records {
  alignas(128) unsigned char upper[8 * kPitch], lower[8 * kPitch];  // by 16 columns
  alignas(16) uint32_t offset[kMostBlocks + 8][4];                  // by group of 32 columns
  float factor[kMostBlocks];
};

// Right operand whose first row is at `row`: K-major without swizzle, `leading` bytes from 16 bytes of a row to the
// next.
__device__ __forceinline__ uint64_t desc_rows(const void* row, int leading) {
  return uint64_t(8) << 32 | uint64_t(leading >> 4) << 16 | (smem_u32(row) & 0x3FFFF) >> 4;
}
__device__ __forceinline__ void multiply_e4m3(float (&d)[4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// By one warp: a block of columns, four of them a lane.
__device__ __forceinline__ void put_record(Records& r, int block, uint2 four, int lane) {
  const Encoded e(four, lane);
  const int at = (lane >> 2) * kPitch + block * 16 + e.word * 4;
  *reinterpret_cast<uint32_t*>(r.upper + at) = e.upper;
  *reinterpret_cast<uint32_t*>(r.lower + at) = e.lower;
  if (lane % 8 == 0) r.offset[block][lane / 8] = e.offset;
  if (lane == 0) r.factor[block] = e.factor;
}

// sum += 64 rows by a block of columns, in the order of w4a16_e4m3.cuh's multiply_chunk.
__device__ __forceinline__ void multiply_tile(const unsigned char* tile, const Records& r, int block, float (&sum)[4]) {
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  const int t = threadIdx.x & 127, q = t & 3;
  const uint4 word[2] = {*reinterpret_cast<const uint4*>(tile + t * 16),
                         *reinterpret_cast<const uint4*>(tile + 2048 + t * 16)};
  const uint4 scale = *reinterpret_cast<const uint4*>(tile + kTileWords + (t >> 2) * 16);
  const uint32_t pair[4] = {scale.x, scale.y, scale.z, scale.w};
  const uint32_t mine = q & 2 ? (q & 1 ? scale.w : scale.z) : q & 1 ? scale.y : scale.x;
  uint32_t rows[4] = {__byte_perm(mine, 0, 0x1010), __byte_perm(mine, 0, 0x3232), 0, 0}, left[4][4];
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const uint4 two = word[g / 2];
    const uint32_t one = g & 1 ? two.z : two.x, other = g & 1 ? two.w : two.y;
    left[g][0] = one & kLow, left[g][1] = (one >> 4) & kLow;
    left[g][2] = other & kLow, left[g][3] = (other >> 4) & kLow;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("" : "+r"(rows[i]));
#pragma unroll
    for (int g = 0; g < 4; ++g) asm volatile("" : "+r"(left[g][i]));
  }
  fence_regs(sum);
  const uint64_t upper = desc_rows(r.upper + block * 16, kPitch), lower = desc_rows(r.lower + block * 16, kPitch);
  constexpr uint64_t kGroup = 2 * kPitch >> 4;
  float part[4][4];
  wgmma_fence();
#pragma unroll
  for (int g = 0; g < 4; ++g) multiply_e4m3(part[g], left[g], upper + g * kGroup, 0);
  WgmmaBf16Rs<8>::go(sum, rows, desc_rows(r.offset[block], 0));
#pragma unroll
  for (int g = 0; g < 4; ++g) multiply_e4m3(part[g], left[g], lower + g * kGroup, 1);
  wgmma_commit();
  wgmma_wait<0>();
  fence_regs(sum);
  float chunk[2];
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    fence_regs(part[g]);
    const float low = __uint_as_float(pair[g] << 16), high = __uint_as_float(pair[g] & 0xffff0000u);
    chunk[0] = g ? fmaf(low, part[g][0], chunk[0]) : low * part[g][0];
    chunk[1] = g ? fmaf(high, part[g][2], chunk[1]) : high * part[g][2];
  }
  sum[0] = fmaf(chunk[0], r.factor[block], sum[0]);
  sum[2] = fmaf(chunk[1], r.factor[block], sum[2]);
}

__device__ __forceinline__ void request_tile(unsigned char* to, uint64_t* full, const unsigned char* words,
                                             const unsigned char* scales, size_t chunk, int tile) {
  mbar_arrive_expect_tx(full, kTileBytes);
  bulk_load(to, words + chunk * kChunkBytes + tile * kTileWords, kTileWords, full, kEvictFirst);
  bulk_load(to + kTileWords, scales + chunk * kScaleBytes<Int4> + tile * kScales, kScales, full, kEvictFirst);
}

struct UpMemory {
  Records records;
  float sums[2][64], parts[kMostSplits][64];        // of the warpgroups; of the cluster's blocks
  alignas(8) uint64_t full[kMostBlocks], gathered;  // gathered: once all parts are here
  alignas(128) unsigned char w[1][kTileBytes];      // and further ones, a warpgroup's after the other's
  static size_t bytes(int ring) { return sizeof(UpMemory) + size_t(2 * ring - 1) * kTileBytes; }
};

// The first `shared_rows` rows of the grid are the shared expert's, whose weights need no routing.
template <int N>
__global__ void __launch_bounds__(kUpThreads, 3) few_gate_up(const __grid_constant__ CUtensorMap shared_map,
                                                             const __grid_constant__ FewArguments a, int shared_rows) {
  extern __shared__ __align__(1024) unsigned char raw[];
  if (int(blockIdx.y) < shared_rows) {
    const int index = blockIdx.y * gridDim.x + blockIdx.x;
    if (index * kSharedRows < a.shared_inter) shared_gate_up<N>(raw, shared_map, shared_of(a), index);
    return;
  }
  UpMemory& m = *reinterpret_cast<UpMemory*>(raw);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int group = __shfl_sync(kAll, thread / 128, 0);
  const int split = blockIdx.x % a.splits, tile = blockIdx.x / a.splits, pair = blockIdx.y - shared_rows;
  const int chunks = a.hidden / 128, begin = split * chunks / a.splits, end = (split + 1) * chunks / a.splits;
  const int mine = (end - begin - group + 1) / 2, ahead = min(mine, a.ring);  // blocks of columns of the warpgroup
  if (a.splits > 1) {
    if (thread == 0) {
      mbar_init(&m.gathered, 1);
      fence_mbar_init();
      mbar_arrive_expect_tx(&m.gathered, a.splits * 64 * 4);
    }
    decode::cluster_begin();
  }
  if (thread % 128 < ahead) {
    mbar_init(&m.full[group * a.ring + thread % 128], 1);
    fence_mbar_init();
  }
  pdl_wait();
  pdl_launch();
  float weight;
  const int expert = decode::routed_expert(a, pair, weight);
  if (expert < 0) return;  // as all blocks of the cluster
  const size_t first = (size_t(expert) * (a.inter / 128) + tile / 4) * chunks + begin + group;
  unsigned char* const w = m.w[group * a.ring];
  uint64_t* const full = m.full + group * a.ring;
  auto request = [&](int i) {
    request_tile(w + i % a.ring * kTileBytes, full + i % a.ring, a.gate_up, a.gate_up_scale, first + 2 * i, tile % 4);
  };
  if (thread % 128 < ahead) request(thread % 128);
  const uint2* x = reinterpret_cast<const uint2*>(a.x + int64_t(pair / a.top_k) * a.hidden) + begin * 32 + lane;
  constexpr int kWarps = kUpThreads / 32, kEach = 4;
  for (int from = warp; from < end - begin; from += kEach * kWarps) {
    uint2 four[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) four[i] = __ldcg(x + min(from + i * kWarps, end - begin - 1) * 32);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (from + i * kWarps < end - begin) put_record(m.records, from + i * kWarps, four[i], lane);
  }
  fence_proxy_async();
  __syncthreads();

  float sum[4] = {};
#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    mbar_wait(full + i % a.ring, i / a.ring & 1);
    multiply_tile(w + i % a.ring * kTileBytes, m.records, 2 * i + group, sum);
    if (i + a.ring < mine) {
      named_sync(1 + group, 128);  // all of the warpgroup has read the tile
      if (thread % 128 == 0) request(i + a.ring);
    }
  }
  // A gate row of eight and its up row: the first column is lanes 0, 4, ...
  const int row = warp % 4 * 8 + lane / 4;
  if (lane % 4 == 0) m.sums[group][row] = sum[0], m.sums[group][32 + row] = sum[2];
  __syncthreads();
  if (a.splits > 1) {
    decode::cluster_wait();  // the first block has begun, so that its shared memory is its own
    if (thread < 64) store_remote(&m.parts[split][thread], 0, m.sums[0][thread] + m.sums[1][thread], &m.gathered);
    if (split > 0) return;
    mbar_wait(&m.gathered, 0);
  }
  if (thread >= 32) return;
  float gate, up;
  if (a.splits == 1) {
    gate = m.sums[0][thread] + m.sums[1][thread], up = m.sums[0][32 + thread] + m.sums[1][32 + thread];
  } else {
    gate = up = 0.f;
    for (int s = 0; s < a.splits; ++s) gate += m.parts[s][thread], up += m.parts[s][32 + thread];
  }
  a.intermediate[int64_t(pair) * a.inter + tile * 32 + thread] =
      __float2bfloat16(__fdividef(gate, 1.f + __expf(-gate)) * up);
}

struct DownMemory {
  Records records;
  float outputs[decode::kMaxSlots][64];  // of a pair, rounded
  float shared_output[64];
  decode::Pairs pairs[16];  // of a warp
  alignas(8) uint64_t full[kMostBlocks], shared_full;
  alignas(128) unsigned char w[1][kTileBytes];
  static size_t bytes(int tiles) { return sizeof(DownMemory) + size_t(tiles - 1) * kTileBytes; }
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS, 768 / THREADS)
    few_down(const __grid_constant__ CUtensorMap shared_map, const __grid_constant__ FewArguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const SharedArguments shared = shared_of(a);
  DownMemory& m = *reinterpret_cast<DownMemory*>(raw + SharedDownMemory::bytes(shared));
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int group = __shfl_sync(kAll, thread / 128, 0), tile = blockIdx.x, token = blockIdx.y;
  const int chunks = a.inter / 128;
  if (thread == THREADS - 1 && shared.ring) {
    if (smem_u32(raw) & 1023) __trap();
    mbar_init(&m.shared_full, 1);
    fence_mbar_init();
    mbar_arrive_expect_tx(&m.shared_full, shared.inter / 64 * kUnitBytes);
    for (int i = 0; i < shared.inter / 64; ++i)
      tma_load_2d(smem_u32(raw + i * kUnitBytes), &shared_map, &m.shared_full, i * 64, tile * 64,
                  a.tokens > 1 ? kEvictNormal : kEvictFirst);
  }
  // Routing is there: the launch before this one has waited for it.
  const int count = decode::list_pairs(a, token, false, m.pairs[warp]);
  const decode::Pairs& pairs = m.pairs[warp];
  if (thread < count * chunks) {
    const size_t expert = pairs.entry[thread / chunks] & 0xffff;
    mbar_init(&m.full[thread], 1);
    fence_mbar_init();
    request_tile(m.w[thread], &m.full[thread], a.down, a.down_scale,
                 (expert * (a.hidden / 256) + tile / 4) * chunks + thread % chunks, tile % 4);
  }
  pdl_wait();
  pdl_launch();
  const uint2* given = reinterpret_cast<const uint2*>(a.intermediate + int64_t(token) * a.top_k * a.inter) + lane;
  for (int block = warp; block < count * chunks; block += THREADS / 32) {
    const int slot = pairs.entry[block / chunks] >> 16;
    put_record(m.records, block, __ldcg(given + (slot * chunks + block % chunks) * 32), lane);
  }
  // The token as the first row of a right operand, 64 columns after 64.
  if (const int v = THREADS - 1 - thread; shared.ring && v < shared.inter / 8)
    *reinterpret_cast<uint4*>(raw + shared.inter / 64 * kUnitBytes + v / 8 * 1024 + v % 8 * 16) =
        __ldcg(reinterpret_cast<const uint4*>(shared.intermediate + int64_t(token) * shared.inter) + v);
  fence_proxy_async();
  __syncthreads();
  for (int one = group; one < count; one += THREADS / 128) {
    float sum[2][4] = {};  // of every other block of columns
#pragma unroll 1
    for (int i = 0; i < chunks; i += 2) {
      mbar_wait(&m.full[one * chunks + i], 0);
      multiply_tile(m.w[one * chunks + i], m.records, one * chunks + i, sum[0]);
      if (i + 1 == chunks) break;
      mbar_wait(&m.full[one * chunks + i + 1], 0);
      multiply_tile(m.w[one * chunks + i + 1], m.records, one * chunks + i + 1, sum[1]);
    }
    // Row g of the fragment is row 4 * (g / 2) + g % 2 of the sixteen, row g + 8 the second after it.
    const int g = lane / 4, row = warp % 4 * 16 + 4 * (g / 2) + g % 2;
    if (lane % 4 == 0) {
      m.outputs[one][row] = __bfloat162float(__float2bfloat16(sum[0][0] + sum[1][0]));
      m.outputs[one][row + 2] = __bfloat162float(__float2bfloat16(sum[0][2] + sum[1][2]));
    }
  }
  if (shared.ring && group == THREADS / 128 - 1) shared_down(raw, &m.shared_full, shared, m.shared_output);
  __syncthreads();
  if (thread >= 64) return;
  float sum = 0.f;
  for (int one = 0; one < count; ++one) sum = fmaf(m.outputs[one][thread], pairs.weight[one], sum);
  __nv_bfloat16 result = __float2bfloat16(sum);
  if (shared.ring) result = __float2bfloat16(__bfloat162float(result) + m.shared_output[thread]);
  a.out[int64_t(token) * a.hidden + tile * 64 + thread] = result;
}

template <int N>
int start(const FewArguments& a, cudaStream_t stream) {
  const SharedArguments shared = shared_of(a);
  const int tiles = a.top_k * (a.inter / 128), columns = a.inter / 32 * a.splits;
  size_t first_bytes = UpMemory::bytes(a.ring),
         second_bytes = SharedDownMemory::bytes(shared) + DownMemory::bytes(tiles);
  int shared_rows = 0;
  CUtensorMap gate_up = {}, down = {};
  if (shared.ring) {
    first_bytes = first_bytes > SharedMemory<N>::bytes(shared) ? first_bytes : SharedMemory<N>::bytes(shared);
    shared_rows = (shared.inter / kSharedRows + columns - 1) / columns;
    if (int rc =
            host::encode_parts(&gate_up, a.shared_gate_up, 2 * shared.inter, shared.hidden, kSharedParts, kSharedRows))
      return rc;
    if (int rc =
            host::encode_rows(&down, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, a.shared_down, shared.inter, a.hidden, 64))
      return rc;
  }
  if (first_bytes > host::kMaxShared || second_bytes > host::kMaxShared) return host::kNoInstance;
  const host::Launch first{dim3(columns, shared_rows + a.tokens * a.top_k),
                           kUpThreads,
                           first_bytes,
                           stream,
                           true,
                           a.splits,
                           host::kWholeShare};
  if (int rc = host::launch(few_gate_up<N>, first, gate_up, a, shared_rows)) return rc;
  // Of one token a block has an SM to itself; of more, several blocks hide each other's latencies.
  const int threads = a.tokens == 1 ? 512 : 256;
  const host::Launch second{dim3(a.hidden / 64, a.tokens), threads, second_bytes, stream, true, 1, host::kWholeShare};
  return host::launch(a.tokens == 1 ? few_down<512> : few_down<256>, second, down, a);
}

}  // namespace w4a16

// Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_w4a16_few(const w4a16::FewArguments* args, void* stream_ptr) {
  using namespace w4a16;
  const FewArguments& a = *args;
  const auto stream = static_cast<cudaStream_t>(stream_ptr);
  const int tiles = a.top_k * (a.inter / 128), chunks = (a.hidden / 128 + a.splits - 1) / a.splits;
  if (a.top_k < 2 || a.top_k >= decode::kMaxSlots || tiles > kMostBlocks || chunks > kMostBlocks ||
      a.splits > kMostSplits || 2 * a.ring > kMostBlocks || a.tokens > 4 || a.shared_ring > kMostRing ||
      (a.shared_ring && (a.hidden % (64 * kSharedParts) || a.shared_inter % 64 || a.shared_inter > kMostSharedInter)))
    return host::kNoInstance;
  if (a.shared_ring && a.tokens > 2) return host::kNoInstance;
  return a.shared_ring && a.tokens == 2 ? start<16>(a, stream) : start<8>(a, stream);
}
