// How the rows of an e4m3 cache come to shared memory as float16, and queries with them.
#pragma once
#include "mla_copy.cuh"

namespace mla {

// How many steps before their use the L2 is asked for rows.
constexpr int kAhead = 3;

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

// One step of a warp: sixteen rows, each loaded at once, of which a lane has sixteen values of the latent, then eight
// and eight rotated keys. A lane stores two chunks of a swizzled row; lanes of every other box begin with the second
// one, so that no two lanes that store at once meet in a bank.
template <class M>
__device__ __forceinline__ void convert_step(M& m, const Arguments& a, int64_t row0, int stage, int phase) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, odd = lane / 4 % 2;
  const int64_t begin = row0 + warp * 16;
  // Past the cache's end its last row is read: what lies past a sequence's end is dropped.
  const int last = int(min(a.rows - 1 - begin, int64_t(15)));
  const uint8_t* from = a.cache + begin * kRow;
  uint4 held[18];
#pragma unroll
  for (int k = 0; k < 16; ++k) held[k] = __ldcg(reinterpret_cast<const uint4*>(from + min(k, last) * kRow) + lane);
#pragma unroll
  for (int k = 0; k < 2; ++k)
    held[16 + k] =
        __ldcg(reinterpret_cast<const uint4*>(from + min(k * 8 + lane / 4, last) * kRow + kLatent) + lane % 4);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) mbar_wait(&m.empty[stage][group], phase ^ 1);
  uint8_t* const rows = m.stage[stage] + warp * 2 * kEight;
  uint8_t* const latent = rows + lane / 4 * kBoxBytes;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const uint4 now = odd ? make_uint4(held[k].z, held[k].w, held[k].x, held[k].y) : held[k];
    const int chunk = (lane % 4 * 2 + odd) ^ k % 8, place = k / 8 * kEight + k % 8 * 128;
    *reinterpret_cast<uint4*>(latent + place + chunk * 16) = eight_f16(now.x, now.y);
    *reinterpret_cast<uint4*>(latent + place + (chunk ^ 1) * 16) = eight_f16(now.z, now.w);
  }
  uint8_t* const key = rows + 8 * kBoxBytes + lane / 4 * 128;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint4 now = held[16 + k];
    const int chunk = lane % 4 * 2 ^ lane / 4;
    *reinterpret_cast<uint4*>(key + k * kEight + chunk * 16) = eight_f16(now.x, now.y);
    *reinterpret_cast<uint4*>(key + k * kEight + (chunk ^ 1) * 16) = eight_f16(now.z, now.w);
  }
  fence_proxy_async();
  __syncwarp();
  if (lane == 0)
    for (int group = 0; group < kGroups; ++group) mbar_arrive(&m.full[stage][group]);
}

// By so many groups of four warps, which take 64 rows in turn. `done`: steps of the block's items before;
// `behind_first()` is called behind the part's first step by the group that has it.
template <int GROUPS, class M, class Then>
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
    convert_step(m, a, first, stage, phase);
    if (i == 0) behind_first();
  }
}

template <int GROUPS, class M>
__device__ __forceinline__ void convert_rows(M& m, const Arguments& a, const Part& part, int request, int page) {
  convert_rows<GROUPS>(m, a, part, request, page, 0, [] {});
}

// The same for a block's items. Where queries have one place, an item's first rows do not wait for it.
template <int GROUPS, class M>
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
    convert_rows<GROUPS>(m, a, part, item.request, page, done, [&] {
      if (!early && threadIdx.x % 128 == 0) copy_next_query(m, a, query, item.request, k);
      __syncwarp();
    });
    done += part.count;
  }
}

}  // namespace mla
