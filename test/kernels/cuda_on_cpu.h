// A stand-in for CUDA: the clusters of a launch run one after another, a cluster's threads take turns in one thread of
// the host, each until it waits at a barrier of its warp, block or cluster. What csrc/decode_ptx.cuh gives to the
// kernels for a few tokens is given here in C++. Dynamic shared memory is as large as the launch asks for; what lies
// behind it must not be written. Kernels of clusters keep nothing in static shared memory, of which there is one copy.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
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
struct uint2 {
  uint32_t x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  uint16_t low, high;
};

inline dim3 threadIdx, blockIdx, blockDim;

namespace on_cpu {

constexpr int kWarps = 32, kBlocks = 8, kCanary = 65536, kOverrun = 1001, kDeadlock = 1002;
constexpr size_t kStack = 1 << 17;

struct Turns {
  std::vector<ucontext_t> threads;
  std::vector<bool> done;
  ucontext_t host;
  unsigned current;
  bool moved;  // since the last round some thread passed or reached a barrier
  std::function<void()> body;
};
inline Turns turns;
inline void give_way() { swapcontext(&turns.threads[turns.current], &turns.host); }

struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;
  void arrive() {
    turns.moved = true;
    if (++arrived >= expected) arrived = 0, ++generation;
  }
  void arrive_and_wait() {
    const unsigned mine = generation;
    arrive();
    while (generation == mine) give_way();
  }
  void leave() {
    if (--expected == arrived && arrived > 0) arrived = 0, ++generation;
  }
};
struct Block {
  Barrier barrier, warps[kWarps];
  uint32_t exchange[kWarps][32], fragments[kWarps][32][6];
  unsigned char* shared;
};
inline Block blocks[kBlocks];
inline Barrier cluster_barrier;
inline unsigned rank, cluster_generation[kBlocks * kWarps * 32];
inline unsigned char* dynamic_shared;

template <class T>
inline T trade(T value, int from) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Block& block = blocks[rank];
  std::memcpy(&block.exchange[warp][lane], &value, 4);
  block.warps[warp].arrive_and_wait();
  T other;
  std::memcpy(&other, &block.exchange[warp][from & 31], 4);
  block.warps[warp].arrive_and_wait();
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

inline void run_thread() {
  const unsigned thread = turns.current;
  turns.body();
  blocks[rank].warps[threadIdx.x / 32].leave();
  blocks[rank].barrier.leave();
  cluster_barrier.leave();
  turns.done[thread] = turns.moved = true;
  give_way();
}

// False if all threads that are left wait for others that are left. `first`: the cluster's block of rank zero.
inline bool run_cluster(dim3 first, int cluster, int threads) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  const int all = cluster * threads;
  while (int(stacks.size()) < all) stacks.emplace_back(new char[kStack]);
  cluster_barrier = {all};
  for (int block = 0; block < cluster; ++block) {
    blocks[block].barrier = {threads};
    for (int warp = 0; warp < threads / 32; ++warp) blocks[block].warps[warp] = {32};
  }
  turns.threads.resize(all);
  turns.done.assign(all, false);
  for (int thread = 0; thread < all; ++thread) {
    ucontext_t& context = turns.threads[thread];
    getcontext(&context);
    context.uc_stack.ss_sp = stacks[thread].get();
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, run_thread, 0);
  }
  for (int left = all; left > 0;) {
    turns.moved = false;
    for (int thread = 0; thread < all; ++thread) {
      if (turns.done[thread]) continue;
      turns.current = thread;
      rank = thread / threads;
      dynamic_shared = blocks[rank].shared;
      threadIdx = dim3(thread % threads);
      blockIdx = dim3(first.x + rank, first.y, first.z);
      swapcontext(&turns.host, &turns.threads[thread]);
      left -= turns.done[thread];
    }
    if (!turns.moved) return false;
  }
  return true;
}

}  // namespace on_cpu

inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
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
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {  // of bf16's, exact in double
  auto one = [](uint16_t x, uint16_t y, uint16_t z) {
    return float(double(on_cpu::float_of(x)) * on_cpu::float_of(y) + on_cpu::float_of(z));
  };
  return __floats2bfloat162_rn(one(a.low, b.low, c.low), one(a.high, b.high, c.high));
}
inline __nv_bfloat162 __hneg2(__nv_bfloat162 a) { return {uint16_t(a.low ^ 0x8000), uint16_t(a.high ^ 0x8000)}; }
inline __nv_bfloat162 __low2bfloat162(__nv_bfloat162 a) { return {a.low, a.low}; }
inline __nv_bfloat162 __high2bfloat162(__nv_bfloat162 a) { return {a.high, a.high}; }
inline float __bfloat162float(__nv_bfloat16 value) { return on_cpu::float_of(value.bits); }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
using std::min;
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __ffsll(uint64_t x) { return __builtin_ffsll(x); }
template <class T>
inline T __ldg(const T* at) {
  return *at;
}
template <class T>
inline T __ldcg(const T* at) {
  return *at;
}
inline void __syncthreads() { on_cpu::blocks[on_cpu::rank].barrier.arrive_and_wait(); }
inline void __syncwarp() { on_cpu::blocks[on_cpu::rank].warps[threadIdx.x / 32].arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) { return on_cpu::trade(value, threadIdx.x % 32 ^ mask); }
inline int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = threadIdx.x % 32;
  return on_cpu::trade(value, lane < step ? lane : lane - step);
}
inline void __threadfence() {}
template <class T>
inline T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return on_cpu::trade(value, threadIdx.x % 32 / width * width + lane % width);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= on_cpu::trade(unsigned(predicate), lane) << lane;
  return all;
}

namespace ptx {
inline float exp2_approximate(float x) { return exp2f(x); }
}  // namespace ptx

namespace decode {

inline uint4 load_once(const void* address) { return *static_cast<const uint4*>(address); }
template <class T>
T load_early(const T* address) {
  return *address;
}
inline void pdl_wait() {}
inline void pdl_launch() {}
inline float2 fp8x2_to_float2(uint32_t pair) { return {on_cpu::e4m3(pair & 0xff), on_cpu::e4m3(pair >> 8 & 0xff)}; }
inline float from_half(uint32_t half) {
  static const std::vector<float> values = [] {
    std::vector<float> made;
    for (int exponent = 0; exponent < 32; ++exponent)
      for (int mantissa = 0; mantissa < 1024; ++mantissa)
        made.push_back(exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1 + mantissa / 1024.f, exponent - 15)
                                      : std::ldexp(mantissa / 1024.f, -14));
    return made;
  }();
  return half & 0x8000 ? -values[half & 0x7fff] : values[half];
}
inline uint32_t to_half(float value) {  // to nearest, ties to even
  const uint32_t sign = __float_as_uint(value) >> 16 & 0x8000;
  const float size = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (size >= 65520.f) return sign | 0x7c00;
  int exponent;
  std::frexp(size, &exponent);
  const int step = std::max(exponent - 11, -24);
  const float steps = std::nearbyint(std::ldexp(size, -step));
  const float rounded = std::ldexp(steps, step);
  if (rounded < std::ldexp(1.f, -14)) return sign | uint32_t(std::ldexp(rounded, 24));
  std::frexp(rounded, &exponent);
  return sign | (uint32_t(exponent + 14) << 10) + uint32_t(std::ldexp(rounded, 11 - exponent)) - 1024;
}
inline uint32_t pack_half2(float low, float high) { return to_half(low) | to_half(high) << 16; }
inline float2 from_halves(uint32_t two) { return {from_half(two & 0xffff), from_half(two >> 16)}; }
inline uint32_t fp8x2_to_half2(uint32_t pair) {
  const float2 two = fp8x2_to_float2(pair);
  return pack_half2(two.x, two.y);
}
template <class Halves>
inline void mma(float* d, Halves halves, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto& of = on_cpu::blocks[on_cpu::rank].fragments[warp];
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(of[lane], mine, sizeof(mine));
  __syncwarp();
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      const int quad = k % 8 / 2, column = lane % 4 * 2 + i % 2;
      const float2 a = halves(of[lane / 4 * 4 + quad][k / 8 * 2 + i / 2]);
      const float2 b = halves(of[column * 4 + quad][4 + k / 8]);
      d[i] += k % 2 ? a.y * b.y : a.x * b.x;
    }
  __syncwarp();
}
inline void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  mma(d, from_halves, a0, a1, a2, a3, b0, b1);
}
inline void cp_async_16(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void cp_async_wait() {}

inline void cluster_arrive() {
  on_cpu::cluster_generation[on_cpu::turns.current] = on_cpu::cluster_barrier.generation;
  on_cpu::cluster_barrier.arrive();
}
inline void cluster_begin() { cluster_arrive(); }
inline void cluster_wait() {
  const unsigned mine = on_cpu::cluster_generation[on_cpu::turns.current];
  while (on_cpu::cluster_barrier.generation == mine) on_cpu::give_way();
}
template <class T>
T* map_shared_rank(T* mine, int rank) {
  const ptrdiff_t place = reinterpret_cast<unsigned char*>(mine) - on_cpu::dynamic_shared;
  return reinterpret_cast<T*>(on_cpu::blocks[rank].shared + place);
}

template <class Arguments>
int launch(void (*kernel)(const Arguments), dim3 grid, int threads, size_t shared, const Arguments& a, void*,
           int cluster = 1) {
  blockDim = dim3(threads);
  on_cpu::turns.body = [&] { kernel(a); };
  for (unsigned block = 0; block < grid.x * grid.y * grid.z; block += cluster) {
    // 0xff is NaN in every format: what is read before it is written shows.
    const std::vector<uint4> fresh((shared + on_cpu::kCanary) / 16 + 1, make_uint4(~0u, ~0u, ~0u, ~0u));
    std::vector<std::vector<uint4>> memory(cluster, fresh);
    for (int i = 0; i < cluster; ++i) on_cpu::blocks[i].shared = reinterpret_cast<unsigned char*>(memory[i].data());
    const dim3 first(block % grid.x, block / grid.x % grid.y, block / (grid.x * grid.y));
    if (!on_cpu::run_cluster(first, cluster, threads)) return on_cpu::kDeadlock;
    for (int one = 0; one < cluster; ++one)
      for (int i = 0; i < on_cpu::kCanary; ++i)
        if (on_cpu::blocks[one].shared[shared + i] != 0xff) return on_cpu::kOverrun;
  }
  return 0;
}

}  // namespace decode

// A barrier counts the bytes that are still to come.
namespace ptx {
inline void mma_bf16(float* d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const auto halves = [](uint32_t two) -> float2 {
    return {on_cpu::float_of(two & 0xffff), on_cpu::float_of(two >> 16)};
  };
  decode::mma(d, halves, a0, a1, a2, a3, b0, b1);
}
inline void mbar_init(uint64_t* bar, uint32_t) { *bar = 0; }
inline void fence_mbar_init() {}
inline void mbar_arrive_expect_tx(uint64_t* bar, uint32_t bytes) { *bar += bytes; }
inline void mbar_wait(const uint64_t* bar, uint32_t) {
  while (*static_cast<const volatile uint64_t*>(bar) != 0) on_cpu::give_way();
}
template <class T>
void store_remote(T* mine, int rank, T value, uint64_t* bar) {
  *decode::map_shared_rank(mine, rank) = value;
  *decode::map_shared_rank(bar, rank) -= sizeof(T);
}
}  // namespace ptx
