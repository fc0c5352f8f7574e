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
  __device__ explicit Part(const PlannedItem& item)
      : first(item.begin), count(item.end - item.begin), length(item.length) {}
};

// The page of the part's block `i`; 0 where there is none.
__device__ __forceinline__ int page_of(const Arguments& a, const Part& part, int request, int i) {
  return a.table && i < part.count ? load_l2(a.table + int64_t(request / a.row_share) * a.table_stride + part.first + i)
                                   : 0;
}

// First row of the part's block `i`, whose page is given.
__device__ __forceinline__ int64_t row_of(const Arguments& a, const Part& part, int request, int page, int i) {
  return a.table ? int64_t(page) * kRows
                 : int64_t(request / a.row_share) * a.capacity + int64_t(part.first + i) * kRows;
}

// The L2 is asked for the part's block `i`, which begins at this row.
template <bool FP8_CACHE>
__device__ __forceinline__ void ask(const Arguments& a, const Part& part, int64_t row, int i) {
  constexpr int kBytes = FP8_CACHE ? kRow : kRow * 2;
  const int rows = min(part.length - (part.first + i) * kRows, kRows);
  if (row >= 0 && row + rows <= a.rows) prefetch_bulk_l2(a.cache + row * kBytes, rows * kBytes);
}

template <class M>
__device__ __forceinline__ void copy_query(M& m, const Arguments& a, const CUtensorMap* query, int request,
                                           int to = 0) {
  mbar_arrive_expect_tx(&m.query_full[to], a.heads * kRow * 2);
  for (int box = 0; box < kBoxes; ++box)
    tma_load_2d(smem_u32(m.query[to] + box * M::kQueryBox), query, &m.query_full[to], box * 64, request * a.heads,
                kEvictNormal);
}

// The query of the block's item number `k` once the one before in its place is no longer used; by one thread.
template <class M>
__device__ __forceinline__ void copy_next_query(M& m, const Arguments& a, const CUtensorMap* query, int request,
                                                int k) {
  mbar_wait(&m.query_empty[k % M::kQueries], (k / M::kQueries & 1) ^ 1);
  copy_query(m, a, query, request, k % M::kQueries);
}

template <bool FP8_CACHE, class M>
__device__ __forceinline__ void init_barriers(M& m, const CUtensorMap* query, const CUtensorMap* cache) {
  if (threadIdx.x == 0) {
    prefetch_tensormap(query);
    prefetch_tensormap(cache);
    for (int place = 0; place < M::kQueries; ++place) {
      mbar_init(&m.query_full[place], 1);
      mbar_init(&m.query_empty[place], M::kReaders);
    }
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
      ask<FP8_CACHE>(a, guess, row_of(a, guess, request, page_of(a, guess, request, 0), 0), 0);
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
  if (copies && part.count <= 0) mbar_wait(&m.query_full[0], 0);
  return part;
}

// Through the first-level cache: nobody writes a plan that is followed, and a block's items are neighbours.
__device__ __forceinline__ PlannedItem item_of(const Arguments& a, int number) {
  const int4 found = reinterpret_cast<const int4*>(items_of(a.plan, a.batch, a.blocks))[number];
  return {found.x, found.y, found.z, found.w};
}

// The steps of 64 rows that a part's copies are made of, `n` before it in this block: into which stage, when it is
// free.
template <class M>
__device__ __forceinline__ void copy_step(M& m, const CUtensorMap* cache, int row, int n) {
  const int stage = n % kStages;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    mbar_wait(&m.empty[stage][group], (n / kStages & 1) ^ 1);
    const int boxes = group < 2 ? 4 : 1;
    uint8_t* place = m.stage[stage] + group * kHalfBytes;
    mbar_arrive_expect_tx(&m.full[stage][group], boxes * kBoxBytes);
    for (int box = 0; box < boxes; ++box)
      tma_load_2d(smem_u32(place + box * kBoxBytes), cache, &m.full[stage][group], (group * 4 + box) * 64, row,
                  kEvictFirst);
  }
}

// A block's items of the plan; to the warps that copy, how many steps of the first one's rows are on their way.
struct Items {
  int begin, end, settled;
};

// Whether the launch ahead writes other rows of this context than its last `tokens`: those of other requests of the
// same sequence. They lie next to each other, and have its last page, which no other sequence shares while it grows.
__device__ __forceinline__ bool has_neighbours(const Arguments& a, int request, int length) {
  if (a.row_share > 1 || !a.table || request == 0) return a.row_share > 1;
  const int* last = a.table + int64_t(request) * a.table_stride + (length - 1) / kRows;
  return load_l2(last) == load_l2(last - a.table_stride);
}

// So many steps of a block's first part, `most` of them at most, may come before the launch ahead has ended, where it
// writes the context's last `tokens` rows alone.
__device__ __forceinline__ int settled_steps(const Arguments& a, const Part& part, int request, int most) {
  if (has_neighbours(a, request, part.length)) return 0;
  return max(0, min(min(part.count, most), (part.length - a.tokens) / kRows - part.first));
}

// How a block begins that follows a plan, which is there as a whole before any launch behind it starts; so is the table
// of pages, of which the warps that copy get the first item's first 32.
template <bool FP8_CACHE, class M>
__device__ __forceinline__ Items begin_planned(M& m, const Arguments& a, const CUtensorMap* query,
                                               const CUtensorMap* cache, int* page) {
  const int* firsts = reinterpret_cast<const int*>(first_items_of(a.plan, a.batch)) + blockIdx.x;
  Items items = {__ldcg(firsts), __ldcg(firsts + 1), 0};
  const int lane = int(threadIdx.x) - kConsumers;
  Part part;
  int request = 0;
  init_barriers<FP8_CACHE>(m, query, cache);
  if (items.begin < items.end && lane >= 0) {
    const PlannedItem item = item_of(a, items.begin);
    part = Part(item), request = item.request;
    *page = page_of(a, part, request, lane % 32);
    const int steps = min(part.count, kStages);
    if (!FP8_CACHE) items.settled = settled_steps(a, part, request, kStages);
    if (lane >= items.settled && lane < steps) ask<FP8_CACHE>(a, part, row_of(a, part, request, *page, lane), lane);
  }
  __syncthreads();
  if (!FP8_CACHE && lane >= 0 && lane < 32)
    for (int i = 0; i < items.settled; ++i) {
      const int row = int(row_of(a, part, request, __shfl_sync(~0u, *page, i), i));
      if (lane == 0) copy_step(m, cache, row, i);
      __syncwarp();
    }
  pdl_wait();
  pdl_launch();
  return items;
}

// Where no merge follows, results of contexts without rows, by the threads that compute.
__device__ __forceinline__ void clear_empty(const Arguments& a) {
  if (!a.whole || threadIdx.x >= kConsumers) return;
  const PlannedRequest* requests = requests_of(reinterpret_cast<const PlannedRequest*>(a.plan), a.batch);
  for (int request = blockIdx.x; request < a.batch; request += gridDim.x) {
    if (__ldcg(&requests[request].parts) > 0) continue;
    uint4* out = reinterpret_cast<uint4*>(a.out + int64_t(request) * a.heads * kLatent);
    for (int i = threadIdx.x; i < a.heads * kLatent / 8; i += kConsumers) out[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < a.heads) store_lse(a, int64_t(request) * a.heads + threadIdx.x, -INFINITY);
  }
}

// One warp: 64 rows a step, in nine boxes of 64 columns.
template <class M>
__device__ void copy_rows(M& m, const Arguments& a, const CUtensorMap* cache, const Part& part, int request, int page) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < part.count; ++i) {
    // Thirty-two page numbers a load, so that no copy waits for its own.
    if (i % 32 == 0 && i > 0) page = page_of(a, part, request, i + lane);
    const int row = int(row_of(a, part, request, __shfl_sync(~0u, page, i % 32), i));
    if (lane == 0) copy_step(m, cache, row, i);
    __syncwarp();
  }
}

// The same for a block's items. Where queries have one place, an item's first rows do not wait for it.
template <class M>
__device__ void copy_items(M& m, const Arguments& a, const CUtensorMap* query, const CUtensorMap* cache,
                           const Items& items, int page) {
  const int lane = threadIdx.x % 32;
  int n = 0;
  for (int number = items.begin; number < items.end; ++number) {
    const int k = number - items.begin;
    const PlannedItem item = item_of(a, number);
    const Part part(item);
    const bool early = M::kQueries > 1 || k == 0;
    if (k) page = page_of(a, part, item.request, lane);
    if (early && lane == 0) copy_next_query(m, a, query, item.request, k);
    int i = 0;
    if (k == 0) i = n = items.settled;
    for (; i < part.count; ++i, ++n) {
      if (i % 32 == 0 && i > 0) page = page_of(a, part, item.request, i + lane);
      const int row = int(row_of(a, part, item.request, __shfl_sync(~0u, page, i % 32), i));
      if (lane == 0) {
        copy_step(m, cache, row, n);
        if (!early && i == 0) copy_next_query(m, a, query, item.request, k);
      }
      __syncwarp();
    }
  }
}

// Zeros in one half's 256 columns, by the 128 threads that name the barrier, for the rows from `rows` on: their weights
// are zero, but zero times NaN is NaN. They are the last rows of the sequence.
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
