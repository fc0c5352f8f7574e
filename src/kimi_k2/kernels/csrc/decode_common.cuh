// What the kernels for a few tokens share: each weight is read once, 16 bytes a lane and load, and the launches overlap:
// a kernel asks for its weights before it waits for the one before it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace decode {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffffu;

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

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// 8 bf16 to float32.
__device__ __forceinline__ void widen(const uint4 raw, float* to) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) to[2 * i] = low(words[i]), to[2 * i + 1] = high(words[i]);
}

// Sum of 16 e4m3 values times 16 float32 values.
__device__ __forceinline__ float dot16(const uint4 codes, const float (&x)[16]) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 w = two_codes((words[i / 2] >> (i % 2 * 16)) & 0xffff);
        sum += w.x * x[2 * i] + w.y * x[2 * i + 1];
    }
    return sum;
}

template <int LANES = 32>
__device__ __forceinline__ float sum_lanes(float value) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(kAll, value, mask);
    return value;
}

// A token in shared memory: the first 8 of every 16 values, then the others, so that a warp's reads meet no bank twice.
// `v` counts groups of 8 values, `columns` all values.
__device__ __forceinline__ int place_of(int v, int columns) { return (v & 1) * (columns / 16) + (v >> 1); }

__device__ __forceinline__ void take16(const uint4* token, int columns, int chunk, float (&x)[16]) {
    widen(token[chunk], x);
    widen(token[columns / 16 + chunk], x + 8);
}

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The block's threads take `count` groups of 16 bytes, BATCH a thread at a time, all of a batch's loads before the first
// `put(index, value)`.
template <int BATCH, class Put>
__device__ __forceinline__ void take_groups(const uint4* from, int count, Put put) {
    for (int first = threadIdx.x; first < count; first += BATCH * kThreads) {
        uint4 value[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i * kThreads < count) value[i] = __ldcg(from + first + i * kThreads);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i * kThreads < count) put(first + i * kThreads, value[i]);
    }
}

// Launch that may begin before the previous kernel of the stream has ended.
template <class Arguments>
int launch(void (*kernel)(const Arguments), dim3 grid, int threads, size_t shared, const Arguments& a, void* stream) {
    if (shared > 48 * 1024) {
        const auto status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
        if (status != cudaSuccess) return status;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute overlap;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace decode
