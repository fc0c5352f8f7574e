// 16 bytes of a mailbox: two words of data, each beside the number of its call. Word and number are one 64-bit access,
// so that who sees the number has the word: neither fence nor barrier between GPUs. The tests' all_reduce_on_cpu.h
// stands in.
#pragma once
#include "common/csrc/decode_ptx.cuh"
#ifndef KIMI_K2_CUDA_ON_CPU

namespace decode {

__device__ __forceinline__ void post(uint4* to, uint2 words, uint32_t call) {
  const uint64_t number = uint64_t(call) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1,%2};" ::"l"(to), "l"(number | words.x), "l"(number | words.y)
               : "memory");
}

__device__ __forceinline__ bool arrived(const uint4* at, uint32_t call, uint2& words) {
  uint64_t first, second;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0,%1}, [%2];" : "=l"(first), "=l"(second) : "l"(at) : "memory");
  words = make_uint2(uint32_t(first), uint32_t(second));
  return uint32_t(first >> 32) == call && uint32_t(second >> 32) == call;
}

// A rank that died would leave the others waiting for ever: after as long as NCCL's default, the kernel ends in an
// error.
struct Patience {
  uint64_t since = now();
  static __device__ __forceinline__ uint64_t now() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }
  __device__ __forceinline__ void check() const {
    if (now() - since > 600'000'000'000ull) __trap();
  }
};

}  // namespace decode
#endif
