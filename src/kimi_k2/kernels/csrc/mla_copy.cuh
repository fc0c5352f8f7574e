// Which cache rows a block takes, and how they come to its shared memory.
#pragma once
#include "mla_decode.cuh"

namespace mla {

// Blocks of 64 rows of one part: first one, how many, and the sequence's length.
struct Part {
  int first, count, length;
  __device__ Part(const Arguments& a, int split, int request) {
    length = min(a.lengths[request], a.capacity);
    const int64_t blocks = length > 0 ? (length + kRows - 1) / kRows : 0;
    first = int(blocks * split / a.splits);
    count = int(blocks * (split + 1) / a.splits) - first;
  }
};

template <bool FEW>
__device__ void copy_rows(Memory<FEW>& m, const Arguments& a, const CUtensorMap* query, const CUtensorMap* cache,
                          const Part& part, int request) {
  constexpr int kStages = Shape<FEW>::kStages;
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    moe::mbar_arrive_expect_tx(&m.query_full, a.heads * kRow * 2);
    for (int box = 0; box < kBoxes; ++box)
      moe::tma_load_2d(smem_u32(m.query + box * Shape<FEW>::kQueryBox), query, &m.query_full, box * 64,
                       request * a.heads, moe::kEvictNormal);
  }
  const int* pages = a.table ? a.table + int64_t(request) * a.table_stride + part.first : nullptr;
  int page = 0;
  for (int i = 0; i < part.count; ++i) {
    // Thirty-two page numbers a load, so that no copy waits for its own.
    if (pages && i % 32 == 0) page = i + lane < part.count ? pages[i + lane] : 0;
    const int row = pages ? __shfl_sync(~0u, page, i % 32) * kRows : request * a.capacity + (part.first + i) * kRows;
    const int stage = i % kStages;
    if (lane == 0) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        mbar_wait(&m.empty[stage][group], (i / kStages & 1) ^ 1);
        const int boxes = group < 2 ? 4 : 1;
        uint8_t* place = m.stage[stage] + group * kHalfBytes;
        moe::mbar_arrive_expect_tx(&m.full[stage][group], boxes * kBoxBytes);
        for (int box = 0; box < boxes; ++box)
          moe::tma_load_2d(smem_u32(place + box * kBoxBytes), cache, &m.full[stage][group], (group * 4 + box) * 64, row,
                           moe::kEvictFirst);
      }
    }
    __syncwarp();
  }
}

// Zeros in the 256 columns of this warpgroup for the rows from `rows` on: their weights are zero, but zero times NaN is
// NaN. Nothing is copied into this stage afterwards: they are the last rows of the sequence.
__device__ __forceinline__ void clear_rows(uint8_t* stage, int half, int rows) {
  for (int i = threadIdx.x % 128; i < (kRows - rows) * 32; i += 128) {
    const int row = rows + i / 32, box = i % 32 / 8;
    const int place = box * kBoxBytes + row / 8 * kEight + row % 8 * 128 + i % 8 * 16;
    *reinterpret_cast<uint4*>(stage + half * kHalfBytes + place) = make_uint4(0, 0, 0, 0);
  }
  moe::fence_proxy_async();
  moe::named_sync(kAlone + half, 128);
}

}  // namespace mla
