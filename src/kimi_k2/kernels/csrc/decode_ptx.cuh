// What the kernels for a few tokens need of CUDA beyond C++. test/kernels/cuda_on_cpu.h stands in for all of it, so that
// a machine without a GPU can run the rest.
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

__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ float2 two_codes(uint32_t pair) {
    const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    return __half22float2(*reinterpret_cast<const __half2*>(&half));
}

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The blocks of a cluster, which run together: a barrier in two halves, another block's copy of a place in shared memory.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
template <class T>
__device__ __forceinline__ T* of_rank(T* mine, int rank) {
    uint64_t other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(reinterpret_cast<uint64_t>(mine)), "r"(rank));
    return reinterpret_cast<T*>(other);
}

// Launch that may begin before the previous kernel of the stream has ended.
template <class Arguments>
int launch(void (*kernel)(const Arguments), dim3 grid, int threads, size_t shared, const Arguments& a, void* stream,
           int cluster = 1) {
    return host::launch(kernel, {grid, threads, shared, static_cast<cudaStream_t>(stream), true, cluster}, a);
}

}  // namespace decode
#endif
