// Causal attention of a prompt's tokens over expanded keys (192 wide) and values (128), 128 queries of one head and 128
// slots a step. One warp copies through the tensor memory accelerator. Two warpgroups compute, 64 queries each: the
// next step's scores run on the tensor cores beside this one's values, and both beside the softmax of the other
// warpgroup. Slots are passed in their order from the first one on, whatever the queries beside a query are, so that a
// query's bits depend on its own slots alone.
//
// Blocks claim tiles of queries one by one, of sixteen heads together, whose keys the L2 holds, the ones that see most
// first. Of few tiles two blocks share each: a half of its slots, merged through shared memory.
#include <limits.h>

#include "common/csrc/decode_ptx.cuh"
#include "common/csrc/launch.cuh"
#include "mla_store.cuh"

namespace prefill {

using namespace ptx;

constexpr int kQueries = 128, kSlots = 128, kNope = 128, kRope = 64, kValue = 128, kLatent = 512;
// 64 columns of 128 rows, swizzled; from 8 rows to the next 8.
constexpr int kBox = 128 * 128, kEight = 1024;
constexpr int kKeyBoxes = (kNope + kRope) / 64, kValueBoxes = kValue / 64, kStages = 2;
// Two warpgroups compute, one copies; registers are handed from this to the others.
constexpr int kConsumers = 256, kThreads = kConsumers + 128, kWarps = kConsumers / 32;
constexpr int kConsumerRegisters = 232, kCopierRegisters = 40;
// Named barriers: each warpgroup's turn on the tensor cores, and one warpgroup alone.
constexpr int kTurn = 1, kAlone = 3, kDims = 3, kMostRanks = 2;
// Heads, of all sequences, that are side by side.
constexpr int kTogether = 16;
// Of one launch over sequences one after the other, four numbers each.
constexpr int kMostTiles = 192, kTable = 768;
static_assert(kTable == kMostTiles * 4, "a tile has four numbers");

// Sequences of equal numbers of queries and slots at any positions, or with a table those of any lengths, one after the
// other as one sequence, whose queries are the last of their slots.
struct PrefillArguments {
  const __nv_bfloat16* nope;      // [batch, queries, heads, 128]
  const __nv_bfloat16* rope;      // [batch, queries, heads, 64], rotated
  const __nv_bfloat16* expanded;  // [batch, heads, slots, 256]: keys | values
  const __nv_bfloat16* cache;     // [batch, slots, 576], of which the last 64 are rotated keys
  const int64_t* positions;       // [batch, queries], or null with a table
  __nv_bfloat16* out;             // [batch, queries, heads, 128]
  unsigned* claimed;              // tiles beyond each block's first, zero before and after
  int64_t nope_strides[kDims], rope_strides[kDims], expanded_strides[kDims], cache_strides[kDims];
  int batch, queries, heads, slots, tiles;  // tiles: of each head
  int ranks, sm_count;                      // blocks that share a tile; of the device
  float scale;                              // of the scores, times log2(e)
  // By falling last position, of each tile: first query, queries, the sequence's first slot, the first query's
  // position.
  int table[kTable];
};

struct Memory {
  uint8_t query[kKeyBoxes][kBox], key[kStages][kKeyBoxes][kBox], value[kStages][kValueBoxes][kBox];
  float2 sums[kMostRanks][kQueries];  // of each part: maximum and sum of exponentials
  uint64_t query_full, query_empty, key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
  // The tile, -1 behind the last one. Its steps before `whole` are seen by all its queries, slots from `end` on by
  // none.
  int number, whole, end;
};

// Maps of 64 columns by 128 queries or slots.
struct Maps {
  CUtensorMap nope, rope, expanded, rotated;
};

struct Tile {
  int first, last, head, sequence, slot = 0, position = 0;  // queries first .. last - 1; slots from `slot` on
  __device__ __forceinline__ Tile(const PrefillArguments& a, int number) {
    const int before = number / (a.tiles * kTogether) * kTogether, rest = number - before * a.tiles;
    const int width = min(kTogether, a.heads * a.batch - before), both = before + rest % width, at = rest / width;
    head = both % a.heads;
    sequence = both / a.heads;
    if (a.positions == nullptr) {
      first = a.table[at * 4], last = first + a.table[at * 4 + 1];
      slot = a.table[at * 4 + 2], position = a.table[at * 4 + 3];
    } else {
      first = (a.tiles - 1 - at) * kQueries;
      last = min(first + kQueries, a.queries);
    }
  }
  static __host__ __device__ __forceinline__ int all(const PrefillArguments& a) { return a.tiles * a.heads * a.batch; }
};

// The last slot that a query sees; padding (negative) sees slot 0, so that its row stays finite.
__device__ __forceinline__ int last_seen(const PrefillArguments& a, const Tile& tile, int query) {
  if (a.positions == nullptr) return tile.position + query - tile.first;
  const int64_t position = a.positions[int64_t(tile.sequence) * a.queries + query];
  return int(min(max(position, int64_t(0)), int64_t(a.slots - 1)));
}

// Steps of this block among those up to slot `end`.
template <int RANKS>
struct Steps {
  int begin, end;
  __device__ __forceinline__ explicit Steps(int slots) {
    const int steps = (slots + kSlots - 1) / kSlots, rank = blockIdx.x % RANKS;
    begin = steps * rank / RANKS;
    end = steps * (rank + 1) / RANKS;
  }
};

// By one warp: every tile's queries, and its slots step after step. A block of a cluster has one tile.
template <int RANKS>
__device__ void copy(Memory& m, const PrefillArguments& a, const Maps& maps) {
  const int lane = threadIdx.x % 32, tiles = Tile::all(a);
  int done = 0, round = 0;
  for (int number = blockIdx.x / RANKS, next = tiles; number < tiles; number = __shfl_sync(~0u, next, 0), ++round) {
    const Tile tile(a, number);
    int least = INT_MAX, most = 0;
    for (int query = tile.first + lane; query < tile.last; query += 32) {
      const int seen = last_seen(a, tile, query);
      least = min(least, seen);
      most = max(most, seen);
    }
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    const Steps<RANKS> steps(most + 1);
    if (lane == 0) {
      const auto load_key = [&](int step) {
        const int at = done + step - steps.begin, stage = at % kStages;
        mbar_wait(&m.key_empty[stage], at / kStages % 2 ^ 1);
        mbar_arrive_expect_tx(&m.key_full[stage], kKeyBoxes * kBox);
        for (int box = 0; box < kKeyBoxes - 1; ++box)
          tma_load_4d(smem_u32(m.key[stage][box]), &maps.expanded, &m.key_full[stage], box * 64,
                      tile.slot + step * kSlots, tile.head, tile.sequence, kEvictNormal);
        tma_load_4d(smem_u32(m.key[stage][kKeyBoxes - 1]), &maps.rotated, &m.key_full[stage], 0,
                    tile.slot + step * kSlots, 0, tile.sequence, kEvictNormal);
      };
      if (steps.begin < steps.end) load_key(steps.begin);
      mbar_wait(&m.query_empty, round % 2 ^ 1);
      m.number = number;
      m.whole = (least + 1) / kSlots;
      m.end = most + 1;
      mbar_arrive_expect_tx(&m.query_full, kKeyBoxes * kBox);
      for (int box = 0; box < kKeyBoxes; ++box)
        tma_load_4d(smem_u32(m.query[box]), box * 64 < kNope ? &maps.nope : &maps.rope, &m.query_full, box * 64 % kNope,
                    tile.first, tile.head, tile.sequence, kEvictFirst);
      for (int step = steps.begin; step < steps.end; ++step) {
        if (step + 1 < steps.end) load_key(step + 1);
        const int at = done + step - steps.begin, stage = at % kStages;
        mbar_wait(&m.value_empty[stage], at / kStages % 2 ^ 1);
        mbar_arrive_expect_tx(&m.value_full[stage], kValueBoxes * kBox);
        for (int box = 0; box < kValueBoxes; ++box)
          tma_load_4d(smem_u32(m.value[stage][box]), &maps.expanded, &m.value_full[stage], kNope + box * 64,
                      tile.slot + step * kSlots, tile.head, tile.sequence, kEvictNormal);
      }
    }
    // Now, with two steps to go: an early claim could be of the longest tile left beside the longest of all.
    if (RANKS == 1 && lane == 0) next = gridDim.x + atomicInc(a.claimed, tiles - 1);
    done += steps.end - steps.begin;
  }
  if (lane == 0) {
    mbar_wait(&m.query_empty, round % 2 ^ 1);
    m.number = -1;
    mbar_arrive(&m.query_full);
  }
}

// What a thread keeps of its two rows.
struct State {
  float acc[64], top[2], total[2];
  uint32_t weights[kSlots / 16][4];
};

// Begins score = queries keys^T.
__device__ __forceinline__ void begin_scores(float (&score)[64], Memory& m, int group, int stage) {
  const uint32_t query = smem_u32(m.query[0]) + group * (kBox / 2), key = smem_u32(m.key[stage][0]);
  fence_regs(score);
  wgmma_fence();
#pragma unroll
  for (int box = 0; box < kKeyBoxes; ++box)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      WgmmaBf16<kSlots>::go(score, desc_sw128(query + box * kBox + k * 32), desc_sw128(key + box * kBox + k * 32),
                            box + k > 0);
  wgmma_commit();
}

// Begins acc += weights values.
__device__ __forceinline__ void begin_values(State& state, Memory& m, int stage) {
  const uint32_t value = smem_u32(m.value[stage][0]);
  fence_regs(state.acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSlots / 16; ++k)
    mla::Instructions<false>::values(state.acc, state.weights[k], descriptor(value + k * 2 * kEight, kBox, kEight));
  wgmma_commit();
}

// Scores to exponentials in base 2; returns what earlier sums shrink by.
__device__ __forceinline__ void soften(float (&score)[64], State& state, float (&shrink)[2], float scale) {
  float best[2] = {score[0], score[2]};
#pragma unroll
  for (int j = 0; j < 64; ++j) best[j % 4 / 2] = fmaxf(best[j % 4 / 2], score[j]);
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) best[lower] = fmaxf(best[lower], __shfl_xor_sync(~0u, best[lower], mask));
    const float top = fmaxf(state.top[lower], best[lower] * scale);
    best[lower] = top == -INFINITY ? 0.f : top;  // a part of the slots may have none that a query sees
    shrink[lower] = exp2_approximate(state.top[lower] - best[lower]);
    state.top[lower] = top;
  }
  float sum[2] = {};
#pragma unroll
  for (int j = 0; j < 64; ++j) {
    score[j] = exp2_approximate(__fmaf_rn(score[j], scale, -best[j % 4 / 2]));
    sum[j % 4 / 2] += score[j];
  }
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) state.total[lower] = __fmaf_rn(state.total[lower], shrink[lower], sum[lower]);
}

// Clears a stage's values of slots from `rows` on, which no query sees, by one warpgroup: zeros times what is no
// number would be none.
__device__ __forceinline__ void clear_values(Memory& m, int stage, int rows, int group) {
  const int thread = threadIdx.x % 128;
  for (int i = rows * 8 + thread; i < kSlots * 8; i += 128)
#pragma unroll
    for (int box = 0; box < kValueBoxes; ++box)
      reinterpret_cast<uint4*>(m.value[stage][box])[i] = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
  named_sync(kAlone + group, 128);
}

// Four lanes' eight columns each of a row, 32 columns together, COUNT times from `columns` on.
template <int COUNT>
__device__ __forceinline__ void store(const PrefillArguments& a, const Tile& tile, const float (&value)[COUNT * 16],
                                      int row, int columns, const float (&total)[2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int query = tile.first + row + lower * 8;
    const float inverse = 1.f / total[lower];
    __nv_bfloat16* out =
        a.out + ((int64_t(tile.sequence) * a.queries + query) * a.heads + tile.head) * kValue + columns + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int pair = (n * 4 + j) * 4 + lower * 2;
        words[j] = pack_bf16(value[pair] * inverse, value[pair + 1] * inverse);
      }
      mla::transpose_four(words);
      if (query < tile.last)
        *reinterpret_cast<uint4*>(out + n * 32) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Sums over the cluster's parts: each block takes some of the columns of every row, and stores them.
template <int RANKS>
__device__ __forceinline__ void merge(Memory& m, const PrefillArguments& a, const Tile& tile, const State& state,
                                      int row) {
  constexpr int kOwn = 64 / RANKS;
  static_assert(RANKS * kOwn * kConsumers * 4 <= sizeof(m.key), "the parts lie where keys were");
  const int rank = blockIdx.x % RANKS, thread = threadIdx.x;
  decode::cluster_arrive();  // nobody multiplies keys or values any more
  decode::cluster_wait();
  float4* parts = reinterpret_cast<float4*>(m.key);
#pragma unroll
  for (int to = 0; to < RANKS; ++to) {
    float4* place = decode::map_shared_rank(parts, to) + rank * (kOwn / 4) * kConsumers + thread;
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) {
      const float* from = state.acc + to * kOwn + i * 4;
      place[i * kConsumers] = make_float4(from[0], from[1], from[2], from[3]);
    }
    if (thread % 4 == 0)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower)
        *decode::map_shared_rank(&m.sums[rank][row + lower * 8], to) =
            make_float2(state.top[lower], state.total[lower]);
  }
  decode::cluster_arrive();
  decode::cluster_wait();
  float sum[kOwn] = {}, total[2] = {}, best[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int from = 0; from < RANKS; ++from)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) best[lower] = fmaxf(best[lower], m.sums[from][row + lower * 8].x);
#pragma unroll
  for (int from = 0; from < RANKS; ++from) {
    float factor[2];
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const float2 part = m.sums[from][row + lower * 8];
      factor[lower] = exp2_approximate(part.x - best[lower]);
      total[lower] += part.y * factor[lower];
    }
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) {
      const float4 four = parts[(from * (kOwn / 4) + i) * kConsumers + thread];
      sum[i * 4] += four.x * factor[0], sum[i * 4 + 1] += four.y * factor[0];
      sum[i * 4 + 2] += four.z * factor[1], sum[i * 4 + 3] += four.w * factor[1];
    }
  }
  store<kOwn / 16>(a, tile, sum, row, rank * (kValue / RANKS), total);
}

// By a warpgroup.
template <int RANKS>
__device__ __forceinline__ void compute(Memory& m, const PrefillArguments& a) {
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * 16 + lane / 4;
  if (group == 1) named_arrive(kTurn, kConsumers);
  int done = 0;
  for (int round = 0;; ++round) {
    mbar_wait(&m.query_full, round % 2);
    const int number = m.number, whole = m.whole, end = m.end;
    if (number < 0) return;
    const Tile tile(a, number);
    State state;
    float score[64], shrink[2];
    int seen[2];
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int query = tile.first + row + lower * 8;
      seen[lower] = query < tile.last ? last_seen(a, tile, query) : 0;
      state.top[lower] = -INFINITY, state.total[lower] = 0;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) state.acc[i] = 0;
    const Steps<RANKS> steps(end);
    const auto finish_scores = [&](int step, int at) {
      fence_regs(score);
      if (lane == 0) mbar_arrive(&m.key_empty[at % kStages]);
      if (lane == 0 && step + 1 == steps.end) mbar_arrive(&m.query_empty);
      if (step >= whole) {
        const int column = step * kSlots + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 64; ++j)
          if (column + j / 4 * 8 + j % 2 > seen[j % 4 / 2]) score[j] = -INFINITY;
      }
      soften(score, state, shrink, a.scale);
    };
    const auto pack = [&] {
#pragma unroll
      for (int j = 0; j < 32; ++j) state.weights[j / 4][j % 4] = pack_bf16(score[2 * j], score[2 * j + 1]);
    };
    if (steps.begin < steps.end) {
      mbar_wait(&m.key_full[done % kStages], done / kStages % 2);
      begin_scores(score, m, group, done % kStages);
      wgmma_wait<0>();
      finish_scores(steps.begin, done);
      pack();
      int at = done + 1;
      for (int step = steps.begin + 1; step < steps.end; ++step, ++at) {
        const int before = (at - 1) % kStages;
        mbar_wait(&m.key_full[at % kStages], at / kStages % 2);
        named_sync(kTurn + group, kConsumers);
        begin_scores(score, m, group, at % kStages);
        mbar_wait(&m.value_full[before], (at - 1) / kStages % 2);
        begin_values(state, m, before);
        named_arrive(kTurn + 1 - group, kConsumers);
        wgmma_wait<1>();
        finish_scores(step, at);
        wgmma_wait<0>();
        fence_regs(state.acc);
        if (lane == 0) mbar_arrive(&m.value_empty[before]);
        if (!__all_sync(~0u, shrink[0] == 1.f && shrink[1] == 1.f)) {
#pragma unroll
          for (int i = 0; i < 64; ++i) state.acc[i] *= shrink[i % 4 / 2];
        }
        pack();
      }
      const int last = (at - 1) % kStages;
      mbar_wait(&m.value_full[last], (at - 1) / kStages % 2);
      if (steps.end * kSlots > end) clear_values(m, last, end % kSlots, group);
      begin_values(state, m, last);
      wgmma_wait<0>();
      fence_regs(state.acc);
      if (lane == 0) mbar_arrive(&m.value_empty[last]);
    } else if (lane == 0) {
      mbar_arrive(&m.query_empty);
    }
    done += steps.end - steps.begin;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower)
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) state.total[lower] += __shfl_xor_sync(~0u, state.total[lower], mask);
    if (RANKS > 1) merge<RANKS == 1 ? 2 : RANKS>(m, a, tile, state, row);
    else store<4>(a, tile, state.acc, row, 0, state.total);
  }
}

template <int RANKS>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ Maps maps, const __grid_constant__ PrefillArguments a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Memory& m = *reinterpret_cast<Memory*>(raw);
  if (threadIdx.x == 0) {
    mbar_init(&m.query_full, 1);
    mbar_init(&m.query_empty, kWarps);
    for (int stage = 0; stage < kStages; ++stage) {
      mbar_init(&m.key_full[stage], 1);
      mbar_init(&m.key_empty[stage], kWarps);
      mbar_init(&m.value_full[stage], 1);
      mbar_init(&m.value_empty[stage], kWarps);
    }
    fence_mbar_init();
  }
  __syncthreads();
  pdl_wait();
  if (threadIdx.x >= kConsumers) {
    reg_dealloc<kCopierRegisters>();
    if (threadIdx.x < kConsumers + 32) copy<RANKS>(m, a, maps);
  } else {
    reg_alloc<kConsumerRegisters>();
    compute<RANKS>(m, a);
  }
}

// Tensor map of [batch, heads, rows, columns] in boxes of 64 columns by 128 rows; what lies past the end is zero.
static int encode(CUtensorMap* map, const __nv_bfloat16* base, int columns, int rows, int heads, int batch,
                  const int64_t (&strides)[kDims]) {
  const auto encode_tiled = host::tensor_map_encoder();
  if (!encode_tiled) return host::kNoEncoder;
  const cuuint64_t sizes[4] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(batch)};
  const cuuint64_t steps[3] = {cuuint64_t(strides[0]) * 2, cuuint64_t(strides[1]) * 2, cuuint64_t(strides[2]) * 2};
  const cuuint32_t box[4] = {64, 128, 1, 1}, step[4] = {1, 1, 1, 1};
  return encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<__nv_bfloat16*>(base), sizes, steps, box,
                      step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
             ? host::kNotEncoded
             : 0;
}

template <int RANKS>
static int launch(const PrefillArguments& a, const Maps& maps, cudaStream_t stream) {
  static_assert(sizeof(Memory) <= host::kMaxShared, "a block does not have so much shared memory");
  const int tiles = Tile::all(a);
  const int blocks = RANKS > 1 ? tiles * RANKS : tiles < a.sm_count ? tiles : a.sm_count;
  return host::launch(attend<RANKS>, {dim3(blocks), kThreads, sizeof(Memory), stream, true, RANKS}, maps, a);
}

}  // namespace prefill

// Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_prefill(const prefill::PrefillArguments* args, void* stream_ptr) {
  using namespace prefill;
  const PrefillArguments& a = *args;
  const auto stream = static_cast<cudaStream_t>(stream_ptr);
  Maps maps;
  if (int rc = encode(&maps.nope, a.nope, kNope, a.queries, a.heads, a.batch, a.nope_strides)) return rc;
  if (int rc = encode(&maps.rope, a.rope, kRope, a.queries, a.heads, a.batch, a.rope_strides)) return rc;
  if (int rc = encode(&maps.expanded, a.expanded, kNope + kValue, a.slots, a.heads, a.batch, a.expanded_strides))
    return rc;
  if (int rc = encode(&maps.rotated, a.cache + kLatent, kRope, a.slots, 1, a.batch, a.cache_strides)) return rc;
  if (a.ranks == 1) return launch<1>(a, maps, stream);
  return a.ranks == 2 ? launch<2>(a, maps, stream) : host::kNoInstance;
}
