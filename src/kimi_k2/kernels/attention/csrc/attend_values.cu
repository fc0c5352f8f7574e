// The parts of MLA attention joined, and W_UV behind them, in one launch at decode: out[b, h, v] = W_UV[h, v, :] .
// latent. A cluster of eight blocks owns a head of one token: each block joins 64 of the 512 columns, passes them to
// the others through shared memory, and then computes 16 of the head's 128 rows, whose weights are asked for before
// attention has ended. Of more tokens than let all such clusters run at once, four blocks do.
#include "common/csrc/decode.cuh"
#ifndef KIMI_K2_CUDA_ON_CPU
#include "common/csrc/mbarrier.cuh"
#endif
#include "mla_gather.cuh"
#include "mla_plan.cuh"

namespace decode {

constexpr int kJoined = 512, kWidth = 128, kMaxParts = 128;

// What a cluster's number of blocks gives: columns of a block, threads that have them all, groups of such threads, each
// with every kGroups-th part, and a warp's rows.
template <int BLOCKS>
struct JoinShape {
  static constexpr int kWide = kJoined / BLOCKS, kLanes = kWide / 4, kGroups = kThreads / kLanes;
  static constexpr int kRowsEach = kWidth / BLOCKS / kWarps;
  static_assert(kLanes == 16 || kLanes == 32, "a warp has two groups or one");
};

struct JoinArguments {
  // By a plan [items, heads, 512], else [tokens, heads, splits, 512], normalised; and base-2 logarithms of the parts'
  // sums of exponentials, [items, heads] or [tokens, heads, splits].
  const float* parts;
  const float* sums;
  const __nv_bfloat16* weight;          // [heads, 128, 512]
  __nv_bfloat16* out;                   // [tokens, heads, 128]
  const mla::PlannedRequest* requests;  // [tokens] of the plan
  int tokens, heads, splits;
  int some_parts;  // of `mla::merge_class`
};

template <int BLOCKS>
struct JoinMemory {
  static constexpr int kLanes = JoinShape<BLOCKS>::kLanes;
  union {
    float4 parts[kWarps][kLanes];
    float others[mla::merge_groups(0) - 1][4 + 2][kLanes];
  };
  uint4 latent[kJoined / 8];
  alignas(8) uint64_t gathered;  // once all of it is here
};

// How a context's parts are joined: as there are `splits`, by a plan, or by a plan in the steps of merge_planned.
enum Join { kEven, kPlanned, kUniform };

// The first kLanes threads: four columns each of the joined parts, as merge_planned adds them.
template <int GROUPS, int BLOCKS>
__device__ __forceinline__ bool join_uniform(const JoinArguments& a, JoinMemory<BLOCKS>& m, int64_t begin, int count,
                                             int rank, float (&joined)[4]) {
  using Shape = JoinShape<BLOCKS>;
  const int group = threadIdx.x / Shape::kLanes, lane = threadIdx.x % Shape::kLanes;
  const uint4* from = reinterpret_cast<const uint4*>(a.parts + begin * kJoined + rank * Shape::kWide) + lane;
  mla::Gathered<4> mine;
  if (group < GROUPS)
    mine.template take<GROUPS, mla::kUniformTogether>(
        group, count, [&](int part) { return make_float2(__ldcg(a.sums + begin + int64_t(part) * a.heads), 1.f); },
        [&](int part) { return __ldcg(from + int64_t(part) * a.heads * (kJoined / 4)); },
        [](float (&values)[4], const uint4& raw) {
#pragma unroll
          for (int j = 0; j < 4; ++j) values[j] = __uint_as_float((&raw.x)[j]);
        });
  if (GROUPS > 1) {
    if (group > 0 && group < GROUPS) mine.leave(m.others, group, lane);
    __syncthreads();
    if (group == 0) mine.template add<GROUPS>(m.others, lane);
  }
  if (group > 0) return false;
  mine.divide();
#pragma unroll
  for (int j = 0; j < 4; ++j) joined[j] = mine.sum[j];
  return true;
}

template <Join JOIN, int BLOCKS>
__global__ void __launch_bounds__(kThreads, 2) join_values(const JoinArguments a) {
  DECODE_DYNAMIC_SHARED(uint4, raw);
  JoinMemory<BLOCKS>& m = *reinterpret_cast<JoinMemory<BLOCKS>*>(raw);
  using Shape = JoinShape<BLOCKS>;
  constexpr bool PLANNED = JOIN != kEven;
  constexpr int kRowsEach = Shape::kRowsEach, kGroups = Shape::kGroups, kTurns = 32 / kGroups;
  const int rank = blockIdx.x, head = blockIdx.y;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, group = thread / Shape::kLanes;
  pdl_launch();
  if (thread == 0) {
    ptx::mbar_init(&m.gathered, 1);
    ptx::fence_mbar_init();
    ptx::mbar_arrive_expect_tx(&m.gathered, kJoined * 2);
  }
  cluster_begin();
  const int row = (rank * kWarps + warp) * kRowsEach;
  uint4 raw_weight[kRowsEach][2];
#pragma unroll
  for (int r = 0; r < kRowsEach; ++r)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      raw_weight[r][i] = load_early(
          reinterpret_cast<const uint4*>(a.weight + (int64_t(head) * kWidth + row + r) * kJoined) + i * 32 + lane);
  const int64_t place = int64_t(blockIdx.z) * a.heads + head;
  // A plan is there before attention starts, and so before this launch does.
  const int count = PLANNED ? __ldcg(&a.requests[blockIdx.z].parts) : a.splits, step = PLANNED ? a.heads : 1;
  const int64_t begin = PLANNED ? int64_t(__ldcg(&a.requests[blockIdx.z].first)) * a.heads + head : place * a.splits;
  pdl_wait();

  if constexpr (JOIN == kUniform) {
    float joined[4];
    const int kind = mla::merge_class(count, a.some_parts);
    const bool mine = kind == 0   ? join_uniform<mla::merge_groups(0), BLOCKS>(a, m, begin, count, rank, joined)
                      : kind == 1 ? join_uniform<mla::merge_groups(1), BLOCKS>(a, m, begin, count, rank, joined)
                                  : join_uniform<mla::merge_groups(2), BLOCKS>(a, m, begin, count, rank, joined);
    cluster_wait();  // the others have begun, so that their shared memory is theirs
    if (mine) {
      const __nv_bfloat162 two[2] = {__floats2bfloat162_rn(joined[0], joined[1]),
                                     __floats2bfloat162_rn(joined[2], joined[3])};
#pragma unroll
      for (int other = 0; other < BLOCKS; ++other)
        ptx::store_remote(reinterpret_cast<uint2*>(m.latent) + rank * Shape::kLanes + thread, other,
                          *reinterpret_cast<const uint2*>(two), &m.gathered);
    }
  } else {
    // Each warp weighs all parts, lane l those of l, l + 32, ...; parts without rows are read and dropped.
    float share[kMaxParts / 32], top = -INFINITY, whole = 0;
#pragma unroll
    for (int i = 0; i < kMaxParts / 32; ++i)
      share[i] = i * 32 + lane < count ? __ldcg(a.sums + begin + (i * 32 + lane) * step) : -INFINITY;
    float4 value[kMaxParts / kGroups];
    const float4* from =
        reinterpret_cast<const float4*>(a.parts + begin * kJoined + rank * Shape::kWide) + thread % Shape::kLanes;
#pragma unroll
    for (int i = 0; i < kMaxParts / kGroups; ++i)
      if (group + i * kGroups < count) value[i] = __ldcg(from + int64_t(group + i * kGroups) * step * (kJoined / 4));
#pragma unroll
    for (int i = 0; i < kMaxParts / 32; ++i) top = fmaxf(top, share[i]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, mask));
    // A context of length zero: every part is empty and the result is zero.
#pragma unroll
    for (int i = 0; i < kMaxParts / 32; ++i)
      share[i] = top == -INFINITY ? 0.f : exp2f(share[i] - top), whole += share[i];
    whole = sum_lanes(whole);
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kMaxParts / kGroups; ++i) {
      const float weight = __shfl_sync(kAll, share[i / kTurns], group + i % kTurns * kGroups);
      if (weight > 0 && group + i * kGroups < count) {
        sum[0] += value[i].x * weight, sum[1] += value[i].y * weight;
        sum[2] += value[i].z * weight, sum[3] += value[i].w * weight;
      }
    }
    if (Shape::kLanes == 16)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] += __shfl_xor_sync(kAll, sum[j], 16);
    if (lane < Shape::kLanes) m.parts[warp][lane] = float4{sum[0], sum[1], sum[2], sum[3]};
    __syncthreads();
    cluster_wait();  // the others have begun, so that their shared memory is theirs
    const float inverse = whole > 0 ? 1.f / whole : 0.f;
    // Warp w writes 64 columns to block w, of four blocks the warps w and w + 4.
    const int first = warp / BLOCKS * 64 + 2 * lane;
    const float* columns = reinterpret_cast<const float*>(m.parts) + first;
    float two[2] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) two[0] += columns[w * Shape::kWide], two[1] += columns[w * Shape::kWide + 1];
    const __nv_bfloat162 joined = __floats2bfloat162_rn(two[0] * inverse, two[1] * inverse);
    ptx::store_remote(reinterpret_cast<uint32_t*>(m.latent) + (rank * Shape::kWide + first) / 2, warp % BLOCKS,
                      *reinterpret_cast<const uint32_t*>(&joined), &m.gathered);
  }
  ptx::mbar_wait(&m.gathered, 0);

  float total[kRowsEach] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x[8];
    widen(m.latent[i * 32 + lane], x);
#pragma unroll
    for (int r = 0; r < kRowsEach; ++r) {
      float w[8];
      widen(raw_weight[r][i], w);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[r] += w[j] * x[j];
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsEach; ++r) {
    total[r] = sum_lanes(total[r]);
    if (lane == 0) a.out[place * kWidth + row + r] = __float2bfloat16(total[r]);
  }
}

template <int BLOCKS>
int start_join(const JoinArguments& a, void* stream) {
  const auto kernel = a.requests == nullptr ? join_values<kEven, BLOCKS> : join_values<kPlanned, BLOCKS>;
  const dim3 grid(BLOCKS, a.heads, a.tokens);
  return launch(kernel, grid, kThreads, sizeof(JoinMemory<BLOCKS>), a, stream, BLOCKS);
}

}  // namespace decode

// With `plan`, of [tokens] contexts and at most 128 parts each, `splits` is not used; with `some_parts` too, parts are
// joined in the steps of merge_planned.
extern "C" int kimi_join_values(const float* parts, const float* sums, const void* weight, void* out, const void* plan,
                                int tokens, int heads, int splits, int some_parts, void* stream) {
  using namespace decode;
  if (splits > kMaxParts) return host::kNoInstance;
  static_assert(mla::kMostParts <= kMaxParts, "a plan's parts fit");
  const auto* requests = static_cast<const mla::PlannedRequest*>(plan);
  const JoinArguments a{parts,
                        sums,
                        static_cast<const __nv_bfloat16*>(weight),
                        static_cast<__nv_bfloat16*>(out),
                        plan ? mla::requests_of(requests, tokens) : nullptr,
                        tokens,
                        heads,
                        splits,
                        some_parts};
  if (plan && some_parts)
    return launch(join_values<kUniform, 8>, dim3(8, heads, tokens), kThreads, sizeof(JoinMemory<8>), a, stream, 8);
  constexpr int kMostOfEight = 32;  // heads of all tokens whose clusters of eight run at once, two blocks an SM
  return tokens * heads <= kMostOfEight ? start_join<8>(a, stream) : start_join<4>(a, stream);
}
