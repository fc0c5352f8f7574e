// A stand-in for CUDA: the blocks of a launch run one after another, each of its threads as a thread of the host, with
// barriers for blocks and warps. What csrc/decode_ptx.cuh gives to the kernels for a few tokens is given here in C++.
// Dynamic shared memory is as large as the launch asks for; what lies behind it must not be written.
#pragma once
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define DECODE_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(on_cpu::dynamic_shared)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    uint16_t low, high;
};

inline thread_local dim3 threadIdx, blockIdx;
inline dim3 blockDim;

namespace on_cpu {

constexpr int kWarps = 32, kCanary = 65536, kMissing = 1001;
inline std::unique_ptr<std::barrier<>> block_barrier, warp_barriers[kWarps];
inline uint32_t exchange[kWarps][32];
inline unsigned char* dynamic_shared;

template <class T>
inline T trade(T value, int from) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    std::memcpy(&exchange[warp][lane], &value, 4);
    warp_barriers[warp]->arrive_and_wait();
    T other;
    std::memcpy(&other, &exchange[warp][from & 31], 4);
    warp_barriers[warp]->arrive_and_wait();
    return other;
}
inline float float_of(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}
inline uint16_t rounded(float value) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float e4m3(uint32_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return NAN;
    const float value = exponent ? std::ldexp(1 + mantissa / 8.f, exponent - 7) : std::ldexp(mantissa / 8.f, -6);
    return code & 0x80 ? -value : value;
}

}  // namespace on_cpu

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline __nv_bfloat16 __float2bfloat16(float value) { return {on_cpu::rounded(value)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return {on_cpu::rounded(low), on_cpu::rounded(high)};
}
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(on_cpu::float_of(a.low) + on_cpu::float_of(b.low),
                                 on_cpu::float_of(a.high) + on_cpu::float_of(b.high));
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(on_cpu::float_of(a.low) * on_cpu::float_of(b.low),
                                 on_cpu::float_of(a.high) * on_cpu::float_of(b.high));
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T>
inline T __ldg(const T* at) {
    return *at;
}
template <class T>
inline T __ldcg(const T* at) {
    return *at;
}
inline void __syncthreads() { on_cpu::block_barrier->arrive_and_wait(); }
inline void __syncwarp() { on_cpu::warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) { return on_cpu::trade(value, threadIdx.x % 32 ^ mask); }
inline float __shfl_sync(unsigned, float value, int lane) { return on_cpu::trade(value, lane); }
inline unsigned __ballot_sync(unsigned, bool predicate) {
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= on_cpu::trade(unsigned(predicate), lane) << lane;
    return all;
}

namespace decode {

inline uint4 load_once(const void* address) { return *static_cast<const uint4*>(address); }
inline void wait_for_previous() {}
inline void let_next_start() {}
inline float2 two_codes(uint32_t pair) { return {on_cpu::e4m3(pair & 0xff), on_cpu::e4m3(pair >> 8 & 0xff)}; }
inline void copy_async(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void wait_for_copies() {}

template <class Arguments>
int launch(void (*kernel)(const Arguments), dim3 grid, int threads, size_t shared, const Arguments& a, void*) {
    blockDim = dim3(threads);
    for (unsigned block = 0; block < grid.x * grid.y * grid.z; ++block) {
        // 0xff is NaN in every format: what is read before it is written shows.
        std::vector<uint4> memory((shared + on_cpu::kCanary) / 16 + 1, make_uint4(~0u, ~0u, ~0u, ~0u));
        on_cpu::dynamic_shared = reinterpret_cast<unsigned char*>(memory.data());
        on_cpu::block_barrier = std::make_unique<std::barrier<>>(threads);
        for (int warp = 0; warp < threads / 32; ++warp)
            on_cpu::warp_barriers[warp] = std::make_unique<std::barrier<>>(32);
        std::vector<std::thread> running;
        for (int thread = 0; thread < threads; ++thread)
            running.emplace_back([&, thread] {
                threadIdx = dim3(thread);
                blockIdx = dim3(block % grid.x, block / grid.x % grid.y, block / (grid.x * grid.y));
                kernel(a);
                on_cpu::warp_barriers[thread / 32]->arrive_and_drop();
                on_cpu::block_barrier->arrive_and_drop();
            });
        for (auto& thread : running) thread.join();
        for (int i = 0; i < on_cpu::kCanary; ++i)
            if (on_cpu::dynamic_shared[shared + i] != 0xff) return on_cpu::kMissing;
    }
    return 0;
}

}  // namespace decode
