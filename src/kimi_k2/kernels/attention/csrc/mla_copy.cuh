// Which cache rows a block takes, and how they come to its shared memory.
#pragma once
#include "mla.cuh"

namespace mla {

// Blocks of 64 rows of one part: first one, how many, and the sequence's length.
struct Part {
  int first = 0, count = 0, length = 0;
  Part() = default;
  __device__ Part(const Arguments& a, int found_length, int split) : length(min(found_length, a.capacity)) {
    const uint32_t blocks = length > 0 ? (uint32_t(length) + kRows - 1) / kRows : 0;
    const uint32_t whole = blocks / a.splits, rest = blocks % a.splits;
    first = int(whole * split + rest * split / a.splits);
    count = int(whole * (split + 1) + rest * (split + 1) / a.splits) - first;
  }
  __device__ explicit Part(const PlannedItem& item) : length(item.length) {
    const int units = units_of(length);
    first = begin_of(units, item.part, item.parts);
    count = begin_of(units, item.part + 1, item.parts) - first;
  }
};

// The page of the part's block `i`; 0 where there is none.
__device__ __forceinline__ int page_of(const Arguments& a, const Part& part, int request, int i) {
  return a.table && i < part.count ? load_l2(a.table + int64_t(request / a.share) * a.table_stride + part.first + i)
                                   : 0;
}

// First row of the part's block `i`, whose page is given.
__device__ __forceinline__ int64_t row_of(const Arguments& a, const Part& part, int request, int page, int i) {
  return a.table ? int64_t(page) * kRows : int64_t(request / a.share) * a.capacity + int64_t(part.first + i) * kRows;
}

// The L2 is asked for 64 rows, unless they are not all there.
template <bool FP8_CACHE>
__device__ __forceinline__ void ask(const Arguments& a, int64_t row) {
  constexpr int kBytes = FP8_CACHE ? kRow : kRow * 2;
  if (row >= 0 && row + kRows <= a.rows) prefetch_bulk_l2(a.cache + row * kBytes, kRows * kBytes);
}

template <class M>
__device__ __forceinline__ void copy_query(M& m, const Arguments& a, const CUtensorMap* query, int request) {
  mbar_arrive_expect_tx(&m.query_full, a.heads * kRow * 2);
  for (int box = 0; box < kBoxes; ++box)
    tma_load_2d(smem_u32(m.query + box * M::kQueryBox), query, &m.query_full, box * 64, request * a.heads,
                kEvictNormal);
}

template <bool FP8_CACHE, class M>
__device__ __forceinline__ void init_barriers(M& m, const CUtensorMap* query, const CUtensorMap* cache) {
  if (threadIdx.x == 0) {
    prefetch_tensormap(query);
    prefetch_tensormap(cache);
    mbar_init(&m.query_full, 1);
    for (int stage = 0; stage < kStages; ++stage)
      for (int group = 0; group < kGroups; ++group) {
        mbar_init(&m.full[stage][group], FP8_CACHE ? 4 : 1);
        mbar_init(&m.empty[stage][group], 4);  // the warps of the group's last reader
      }
    fence_mbar_init();
  }
}

// How every block begins: barriers, the wait for the launch ahead, the queries on their way. Gives the block's part
// and, to the warps that copy, its first 32 page numbers. FP8_CACHE: four of them, else one. Without work the part's
// count is not positive.
template <bool FP8_CACHE, class M>
__device__ __forceinline__ Part begin(M& m, const Arguments& a, const CUtensorMap* query, const CUtensorMap* cache,
                                      const Work<false>& work, bool copies, int* page) {
  const int lane = threadIdx.x % 32, split = work.split, request = work.request;
  init_barriers<FP8_CACHE>(m, query, cache);
  Part guess;
  if (copies) {
    // The first rows, by the length and the page as they lie there now. The launch ahead may still change them, and the
    // rows: nothing is taken from here.
    guess = Part(a, load_l2(a.lengths + request / a.share), split);
    if (threadIdx.x == kConsumers && guess.count > 0)
      ask<FP8_CACHE>(a, row_of(a, guess, request, page_of(a, guess, request, 0), 0));
  }
  __syncthreads();
  pdl_wait();
  pdl_launch();
  const int length = load_l2(a.lengths + request / a.share);
  if (copies) {
    *page = page_of(a, guess, request, lane);
    if (threadIdx.x == kConsumers) copy_query(m, a, query, request);
  }
  const Part part(a, length, split);
  if (copies && (part.first != guess.first || part.count != guess.count)) *page = page_of(a, part, request, lane);
  // No block may end before what is copied to it has arrived.
  if (copies && part.count <= 0) mbar_wait(&m.query_full, 0);
  return part;
}

// This block's item of the plan; without work if it cannot be one: a plan may still be on its way.
__device__ __forceinline__ PlannedItem item_of(const Arguments& a) {
  const int4 found = __ldcg(reinterpret_cast<const int4*>(a.plan + a.batch) + blockIdx.x);
  const bool whole = unsigned(found.x) < unsigned(a.batch) && unsigned(found.y) < unsigned(found.z) &&
                     found.z <= kMostParts && found.w > 0 && found.w <= a.capacity;
  return {whole ? found.x : -1, found.y, found.z, found.w};
}

// The same by the plan. Blocks beyond the first wave find nothing to wait for, and many of them nothing to do.
template <bool FP8_CACHE, class M>
__device__ __forceinline__ Part begin(M& m, const Arguments& a, const CUtensorMap* query, const CUtensorMap* cache,
                                      Work<true>& work, bool copies, int* page) {
  const int lane = threadIdx.x % 32;
  const bool late = int(blockIdx.x) >= a.sm_count;
  PlannedItem guess = {-1, 0, 1, 0}, item = guess;
  if (late) {
    pdl_wait();
    pdl_launch();
    item = item_of(a);
    if (item.request < 0) return Part();
  }
  init_barriers<FP8_CACHE>(m, query, cache);
  if (copies && !late) {
    guess = item_of(a);
    const Part part(guess);
    if (threadIdx.x == kConsumers && guess.request >= 0)
      ask<FP8_CACHE>(a, row_of(a, part, guess.request, page_of(a, part, guess.request, 0), 0));
  }
  __syncthreads();
  if (!late) {
    pdl_wait();
    pdl_launch();
    item = item_of(a);
    if (copies && guess.request >= 0) *page = page_of(a, Part(guess), guess.request, lane);
    if (item.request < 0) return Part();
  }
  work = {item.request, item.parts};
  const Part part(item);
  if (copies) {
    if (threadIdx.x == kConsumers) copy_query(m, a, query, item.request);
    const bool same = item.request == guess.request && item.part == guess.part && item.parts == guess.parts &&
                      item.length == guess.length;
    if (!same) *page = page_of(a, part, item.request, lane);
  }
  return part;
}

// One warp: 64 rows a step, in nine boxes of 64 columns.
template <class M>
__device__ void copy_rows(M& m, const Arguments& a, const CUtensorMap* cache, const Part& part, int request, int page) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < part.count; ++i) {
    // Thirty-two page numbers a load, so that no copy waits for its own.
    if (i % 32 == 0 && i > 0) page = page_of(a, part, request, i + lane);
    const int row = int(row_of(a, part, request, __shfl_sync(~0u, page, i % 32), i));
    const int stage = i % kStages;
    if (lane == 0) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        mbar_wait(&m.empty[stage][group], (i / kStages & 1) ^ 1);
        const int boxes = group < 2 ? 4 : 1;
        uint8_t* place = m.stage[stage] + group * kHalfBytes;
        mbar_arrive_expect_tx(&m.full[stage][group], boxes * kBoxBytes);
        for (int box = 0; box < boxes; ++box)
          tma_load_2d(smem_u32(place + box * kBoxBytes), cache, &m.full[stage][group], (group * 4 + box) * 64, row,
                      kEvictFirst);
      }
    }
    __syncwarp();
  }
}

// Zeros in one half's 256 columns, by the 128 threads that name the barrier, for the rows from `rows` on: their weights
// are zero, but zero times NaN is NaN. Nothing is copied into this stage afterwards: they are the last rows of the
// sequence.
__device__ __forceinline__ void clear_rows(uint8_t* stage, int half, int rows, int barrier) {
  for (int i = threadIdx.x % 128; i < (kRows - rows) * 32; i += 128) {
    const int row = rows + i / 32, box = i % 32 / 8;
    const int place = box * kBoxBytes + row / 8 * kEight + row % 8 * 128 + i % 8 * 16;
    *reinterpret_cast<uint4*>(stage + half * kHalfBytes + place) = make_uint4(0, 0, 0, 0);
  }
  fence_proxy_async();
  named_sync(barrier, 128);
}

}  // namespace mla
