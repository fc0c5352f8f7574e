// How the rows of an e4m3 cache come to shared memory as bfloat16.
#pragma once
#include "mla_copy.cuh"

namespace mla {

// How many steps before their use the L2 is asked for rows.
constexpr int kAhead = 3;
// A step of one warp: 18 times 8 rows of 64 columns.
constexpr int kUnits = 2 * kBoxes;

// Two e4m3 values; exact: e4m3 is a part of float16, and of bfloat16.
__device__ __forceinline__ uint32_t two_bf16(uint32_t fp8) {
  const float2 two = from_e4m3(fp8);
  return pack_bf16(two.x, two.y);
}
__device__ __forceinline__ uint4 eight_bf16(uint32_t low, uint32_t high) {
  return make_uint4(two_bf16(low), two_bf16(low >> 16), two_bf16(high), two_bf16(high >> 16));
}

// Two times four warps, each group every other 64 rows: a stage for each of them. Unit k of a warp is half of box k /
// 2: eight rows of 64 columns, of which the odd ones lie 32 rows further on; a lane has sixteen of the columns and
// stores two chunks of the swizzled stage, where no two lanes that store at once meet in a bank.
constexpr int kConverters = 2;
static_assert(kStages == kConverters, "a stage for each group");

// A warp's units from FIRST on, COUNT at a time, into a stage whose groups of boxes are free or will be. The last unit
// of each group says that it is full.
template <int COUNT, int FIRST, class M>
__device__ __forceinline__ void convert_units(M& m, int stage, int phase, int chunk0, const uint8_t* even,
                                              const uint8_t* odd) {
  uint4 units[COUNT];
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    const int unit = FIRST + k;
    units[k] = __ldcg(reinterpret_cast<const uint4*>((unit % 2 ? odd : even) + unit / 2 * 64));
  }
  uint8_t *const place0 = m.stage[stage] + chunk0, *const place1 = m.stage[stage] + (chunk0 ^ 16);
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    const int unit = FIRST + k, box = unit / 2, boxes = box / 4, to = box * kBoxBytes + unit % 2 * 4 * kEight;
    if (unit % 8 == 0) mbar_wait(&m.empty[stage][boxes], phase ^ 1);
    *reinterpret_cast<uint4*>(place0 + to) = eight_bf16(units[k].x, units[k].y);
    *reinterpret_cast<uint4*>(place1 + to) = eight_bf16(units[k].z, units[k].w);
    if (unit % 8 == 7 || unit == kUnits - 1) {
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbar_arrive(&m.full[stage][boxes]);
    }
  }
  if constexpr (FIRST + COUNT < kUnits) convert_units<COUNT, FIRST + COUNT>(m, stage, phase, chunk0, even, odd);
}

// COUNT units are loaded at a time, as registers allow. `done`: steps of the block's items before; `behind_first()` is
// called behind the part's first step by the group that has it.
template <int COUNT, class M, class Then>
__device__ __forceinline__ void convert_rows(M& m, const Arguments& a, const Part& part, int request, int page,
                                             int done, const Then& behind_first) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, row = warp * 8 + lane / 4;
  const int chunk0 = warp * kEight + lane / 4 * 128 + (lane % 4 * 2 ^ lane / 4) * 16;
  const int group = (threadIdx.x - kConsumers) / 128, begin = (group + done) % kConverters;
  int ahead = page_of(a, part, request, lane + kAhead);
  const int mine = __shfl_sync(~0u, page, warp);
  if (group == 0 && lane == 0 && warp < kAhead && warp < part.count) ask<true>(a, row_of(a, part, request, mine, warp));
  for (int i = begin; i < part.count; i += kConverters) {
    const int phase = (done + i) / kStages & 1, start = i / 32 * 32;
    if (i >= 32 && i - start < kConverters) {
      page = page_of(a, part, request, start + lane);
      ahead = page_of(a, part, request, start + lane + kAhead);
    }
    // Past the cache's end its last row is read: what lies past a sequence's end is dropped.
    const unsigned first = unsigned(row_of(a, part, request, __shfl_sync(~0u, page, i % 32), i)) + row;
    const unsigned final = unsigned(a.rows) - 1;
    const uint8_t* even = a.cache + int64_t(min(first, final)) * kRow + lane % 4 * 16;
    const uint8_t* odd = a.cache + int64_t(min(first + 32, final)) * kRow + lane % 4 * 16;
    const int then = __shfl_sync(~0u, ahead, i % 32);
    if (warp == 0 && lane == 0 && i + kAhead < part.count) ask<true>(a, row_of(a, part, request, then, i + kAhead));
    convert_units<COUNT, 0>(m, group, phase, chunk0, even, odd);
    if (i == 0) behind_first();
  }
}

template <int COUNT, class M>
__device__ __forceinline__ void convert_rows(M& m, const Arguments& a, const Part& part, int request, int page) {
  convert_rows<COUNT>(m, a, part, request, page, 0, [] {});
}

// The same for a block's items. Where queries have one place, an item's first rows do not wait for it.
template <int COUNT, class M>
__device__ void convert_items(M& m, const Arguments& a, const CUtensorMap* query, const Items& items, int page) {
  int done = 0;
  for (int number = items.begin; number < items.end; ++number) {
    const int k = number - items.begin;
    const PlannedItem item = item_of(a, number);
    const Part part(item);
    const bool early = M::kQueries > 1 || k == 0;
    if (k) page = page_of(a, part, item.request, threadIdx.x % 32);
    if (early && threadIdx.x == kConsumers) copy_next_query(m, a, query, item.request, k);
    __syncwarp();
    convert_rows<COUNT>(m, a, part, item.request, page, done, [&] {
      if (!early && threadIdx.x % 128 == 0) copy_next_query(m, a, query, item.request, k);
      __syncwarp();
    });
    done += part.count;
  }
}

}  // namespace mla
