// How the rows of an e4m3 cache come to shared memory as float16, and queries with them.
#pragma once
#include "mla_copy.cuh"

namespace mla {

// How many steps before their use the L2 is asked for rows.
constexpr int kAhead = 3;
// A step of one warp: 18 times 8 rows of 64 columns.
constexpr int kUnits = 2 * kBoxes;

// Eight e4m3 values; exact: e4m3 is a part of float16.
__device__ __forceinline__ uint4 eight_f16(uint32_t low, uint32_t high) {
  return make_uint4(halves_of_e4m3(low), halves_of_e4m3(low >> 16), halves_of_e4m3(high), halves_of_e4m3(high >> 16));
}

// Queries were copied as bfloat16 and become float16 where they lie, a 64th as large (`kQueryUnit`): up to 4 million
// they do not overflow, and those below 2^-8, whose last bits are lost, are off by 2^-19 at most, which no softmax
// sees. By all threads that read them.
__device__ __forceinline__ uint32_t shrunk_query(uint32_t both) {
  return pack_f16(__uint_as_float(both << 16) / kQueryUnit, __uint_as_float(both & 0xffff0000u) / kQueryUnit);
}
template <int QUERY_BOX, int THREADS>
__device__ __forceinline__ void shrink_query(uint8_t* query, int heads, int thread, int barrier) {
  for (int i = thread; i < kBoxes * heads * 8; i += THREADS) {
    const int box = i / (heads * 8), chunk = i % (heads * 8);
    uint4& place = reinterpret_cast<uint4*>(query + box * QUERY_BOX)[chunk];
    place = make_uint4(shrunk_query(place.x), shrunk_query(place.y), shrunk_query(place.z), shrunk_query(place.w));
  }
  fence_proxy_async();
  named_sync(barrier, THREADS);
}

// One or two groups of four warps, which take 64 rows in turn. Unit k of a warp is half of box k /
// 2: eight rows of 64 columns, of which the odd ones lie 32 rows further on; a lane has sixteen of the columns and
// stores two chunks of the swizzled stage, where no two lanes that store at once meet in a bank.
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
    *reinterpret_cast<uint4*>(place0 + to) = eight_f16(units[k].x, units[k].y);
    *reinterpret_cast<uint4*>(place1 + to) = eight_f16(units[k].z, units[k].w);
    if (unit % 8 == 7 || unit == kUnits - 1) {
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbar_arrive(&m.full[stage][boxes]);
    }
  }
  if constexpr (FIRST + COUNT < kUnits) convert_units<COUNT, FIRST + COUNT>(m, stage, phase, chunk0, even, odd);
}

// COUNT units are loaded at a time by each of so many groups, as registers allow. `done`: steps of the block's items
// before; `behind_first()` is called behind the part's first step by the group that has it.
template <int COUNT, int GROUPS, class M, class Then>
__device__ __forceinline__ void convert_rows(M& m, const Arguments& a, const Part& part, int request, int page,
                                             int done, const Then& behind_first) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int group = (threadIdx.x - kConsumers) / 128, begin = (group + done) % GROUPS;
  int ahead = page_of(a, part, request, lane + kAhead);
  const int mine = __shfl_sync(~0u, page, warp);
  if (group == 0 && lane == 0 && warp < kAhead && warp < part.count)
    ask<true>(a, part, row_of(a, part, request, mine, warp), warp);
  for (int i = begin; i < part.count; i += GROUPS) {
    const int stage = (done + i) % kStages, phase = (done + i) / kStages & 1, start = i / 32 * 32;
    if (i >= 32 && i - start < GROUPS) {
      page = page_of(a, part, request, start + lane);
      ahead = page_of(a, part, request, start + lane + kAhead);
    }
    const int64_t first = row_of(a, part, request, __shfl_sync(~0u, page, i % 32), i);
    const int then = __shfl_sync(~0u, ahead, i % 32);
    if (warp == 0 && lane == 0 && i + kAhead < part.count)
      ask<true>(a, part, row_of(a, part, request, then, i + kAhead), i + kAhead);
    const int row = warp * 8 + lane / 4, chunk0 = warp * kEight + lane / 4 * 128 + (lane % 4 * 2 ^ lane / 4) * 16;
    const uint8_t* even = a.cache + min(first + row, a.rows - 1) * kRow + lane % 4 * 16;
    const uint8_t* odd = a.cache + min(first + row + 32, a.rows - 1) * kRow + lane % 4 * 16;
    convert_units<COUNT, 0>(m, stage, phase, chunk0, even, odd);
    if (i == 0) behind_first();
  }
}

template <int COUNT, int GROUPS, class M>
__device__ __forceinline__ void convert_rows(M& m, const Arguments& a, const Part& part, int request, int page) {
  convert_rows<COUNT, GROUPS>(m, a, part, request, page, 0, [] {});
}

// The same for a block's items. Where queries have one place, an item's first rows do not wait for it.
template <int COUNT, int GROUPS, class M>
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
    convert_rows<COUNT, GROUPS>(m, a, part, item.request, page, done, [&] {
      if (!early && threadIdx.x % 128 == 0) copy_next_query(m, a, query, item.request, k);
      __syncwarp();
    });
    done += part.count;
  }
}

}  // namespace mla
