// What the kernels for a few tokens need of CUDA beyond C++. test/kernels/cuda_on_cpu.h stands in for all of it, so
// that a machine without a GPU can run the rest.
#pragma once
#ifndef KIMI_K2_CUDA_ON_CPU
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "launch.cuh"

#define DECODE_DYNAMIC_SHARED(type, name) extern __shared__ type name[]

namespace decode {

// Weights stream through: they leave the first-level cache to the tokens.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// Weights that are asked for before `pdl_wait`, but not by ld.global.nc, whether __ldg or load_once: ptxas moves that
// behind the wait.
__device__ __forceinline__ uint4 load_early(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ __forceinline__ uint32_t load_early(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.global.L2::128B.u32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
__device__ __forceinline__ float load_early(const float* address) {
  return __uint_as_float(load_early(reinterpret_cast<const uint32_t*>(address)));
}

__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ float2 fp8x2_to_float2(uint32_t pair) {
  const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return __half22float2(*reinterpret_cast<const __half2*>(&half));
}

// Pairs of float16, the first in the low half: from two e4m3 values, which is exact, and from float32.
__device__ __forceinline__ uint32_t fp8x2_to_half2(uint32_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return halves;
}
__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}

// d += a b over 16 columns: 16 rows of a, 8 columns of b, both float16. Lane 4 g + q has, of rows g (a0, a2) and g + 8
// and of column g of b, the elements 2 q, 2 q + 1 (a0, a1, b0) and those 8 further on; of d the columns 2 q, 2 q + 1.
__device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes to shared memory in the background.
__device__ __forceinline__ void cp_async_16(void* to, const void* from) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from)
      : "memory");
}
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The blocks of a cluster, which run together: a barrier in two halves, another block's copy of a place in shared
// memory.
// `cluster_begin`: the first half where nothing has been written, so that it costs no fence.
__device__ __forceinline__ void cluster_begin() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
template <class T>
__device__ __forceinline__ T* map_shared_rank(T* mine, int rank) {
  uint64_t other;
  asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(reinterpret_cast<uint64_t>(mine)), "r"(rank));
  return reinterpret_cast<T*>(other);
}

// Launch that may begin before the previous kernel of the stream has ended.
template <class Arguments>
int launch(void (*kernel)(const Arguments), dim3 grid, int threads, size_t shared, const Arguments& a, void* stream,
           int cluster = 1) {
  return host::launch(kernel,
                      {grid, threads, shared, static_cast<cudaStream_t>(stream), true, cluster, host::kDecodeShare}, a);
}

}  // namespace decode
#endif
