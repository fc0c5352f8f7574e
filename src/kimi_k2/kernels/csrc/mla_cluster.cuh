// Joins the parts of the blocks of one cluster through each other's shared memory, in the order of the parts: no launch
// for it, and one part in memory for each cluster, or none.
#pragma once
#include "mla_decode.cuh"

namespace mla {

constexpr int kSharedRow = kLatent + 8;  // floats; the eight rows of a fragment lie in different banks

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ uint32_t of_rank(const void* mine, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(moe::smem_u32(mine)), "r"(rank));
  return address;
}
__device__ __forceinline__ float load_remote(uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float4 load_remote4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// All 256 consumer threads, after their last step; m.top and m.total are this block's. Each block writes every heads'
// share of its columns: 512 / cluster of them.
template <bool FEW>
__device__ __forceinline__ void join_cluster(Memory<FEW>& m, const Arguments& a, const float (&acc)[2][64], int request,
                                             int split, int half) {
  static_assert(sizeof(m.stage) >= (FEW ? 8 : 64) * kSharedRow * sizeof(float), "room for the values");
  const int lane = threadIdx.x % 32, rank = split % a.cluster, part = split / a.cluster, parts = a.splits / a.cluster;
  float* values = reinterpret_cast<float*>(m.stage);
  __syncwarp();
  cluster_sync();
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int head = threadIdx.x % 128 / 32 * 16 + lane / 4 + lower * 8;
    if (head >= a.heads) continue;
    float top = -INFINITY, total = 0;
    for (int r = 0; r < a.cluster; ++r) top = fmaxf(top, load_remote(of_rank(&m.top[head], r)));
    // A context of length zero, or a cluster's part of one: every block is empty and the result is zero.
    const float level = top == -INFINITY ? 0.f : top;
    for (int r = 0; r < a.cluster; ++r)
      total += exp2_approximate(load_remote(of_rank(&m.top[head], r)) - level) * load_remote(of_rank(&m.total[head], r));
    const float factor = total > 0 ? exp2_approximate(m.top[head] - level) / total : 0.f;
    if (parts > 1 && rank == 0 && half == 0 && lane % 4 == 0)
      a.sums[(int64_t(request) * a.heads + head) * parts + part] = top + log2f(total);
    float2* row = reinterpret_cast<float2*>(values + head * kSharedRow + half * 256 + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int pair = i % 16 * 4 + lower * 2;
      row[i * 4] = make_float2(acc[i / 16][pair] * factor, acc[i / 16][pair + 1] * factor);
    }
  }
  __syncwarp();
  cluster_sync();
  const int width = kLatent / a.cluster, fours = width / 4;
  for (int i = threadIdx.x; i < a.heads * fours; i += kConsumers) {
    const int head = i / fours, column = rank * width + i % fours * 4;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int r = 0; r < a.cluster; ++r) {
      const float4 one = load_remote4(of_rank(values + head * kSharedRow + column, r));
      sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
    const int64_t place = int64_t(request) * a.heads + head;
    if (parts > 1)
      *reinterpret_cast<float4*>(a.parts + (place * parts + part) * kLatent + column) = sum;
    else
      *reinterpret_cast<uint2*>(a.out + place * kLatent + column) =
          make_uint2(moe::pack_bf16(sum.x, sum.y), moe::pack_bf16(sum.z, sum.w));
  }
  // No block may end while another one reads its values.
  __syncwarp();
  cluster_sync();
}

}  // namespace mla
