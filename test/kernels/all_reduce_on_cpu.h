// Mailboxes between processes of the host, in memory that they share; in place of csrc/all_reduce_ptx.cuh.
#pragma once
#include <atomic>
#include <thread>

#include "cuda_on_cpu.h"

namespace decode {

inline std::atomic<uint64_t>* words_of(const uint4* at) {
  return reinterpret_cast<std::atomic<uint64_t>*>(const_cast<uint4*>(at));
}
inline void post(uint4* to, uint2 words, uint32_t call) {
  words_of(to)[0].store(uint64_t(call) << 32 | words.x, std::memory_order_relaxed);
  words_of(to)[1].store(uint64_t(call) << 32 | words.y, std::memory_order_relaxed);
}
inline bool arrived(const uint4* at, uint32_t call, uint2& words) {
  const uint64_t first = words_of(at)[0].load(std::memory_order_relaxed);
  const uint64_t second = words_of(at)[1].load(std::memory_order_relaxed);
  words = {uint32_t(first), uint32_t(second)};
  return first >> 32 == call && second >> 32 == call;
}
// The threads of a process take turns: who waits lets the others post, and other processes run.
struct Patience {
  void check() const {
    on_cpu::turns.moved = true;
    std::this_thread::yield();
    on_cpu::give_way();
  }
};

}  // namespace decode
