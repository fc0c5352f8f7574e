// Barriers in shared memory that count arrivals and bytes (PTX ISA, "mbarrier").
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ uint32_t smem_u32(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// compute-sanitizer's racecheck (CUDA 13.0) takes this for a store of the warp's last thread, since the compiler makes
// it one instruction of a warp, and warns of the same thread's arrival behind it.
__device__ __forceinline__ void mbar_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_u32(bar)) : "memory");
}
// The same once `read` has come from shared memory. An arrival may overtake loads that wait for their turn, which a
// neighbour's loads can make long, and then lets the copy engine overwrite what they read; only a use of their values
// waits for them. The shift gives zero: a block has more than 32 threads, which the compiler does not know.
__device__ __forceinline__ void mbar_arrive_behind(uint64_t* bar, uint32_t read) {
  asm volatile(
      "{\n"
      ".reg .b32 at;\n"
      "shr.u32 at, %1, %2;\n"
      "add.u32 at, at, %0;\n"
      "mbarrier.arrive.shared::cta.b64 _, [at];\n"
      "}\n" ::"r"(smem_u32(bar)),
      "r"(read), "r"(blockDim.x)
      : "memory");
}
// At the same barrier of another block of the cluster, or of this one; orders no memory accesses beyond this block's.
__device__ __forceinline__ void mbar_arrive_at(uint64_t* bar, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(smem_u32(bar)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void mbar_arrive_expect_tx(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, 0x989680;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(smem_u32(bar)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders this thread's ordinary shared-memory accesses before later ones by the tensor cores or the copy engine.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A value to the place that `mine` is here, in block `rank` of the cluster, whose barrier counts its bytes: no fence
// and no barrier of the cluster orders it.
__device__ __forceinline__ void store_remote(uint32_t* mine, int rank, uint32_t value, uint64_t* bar) {
  asm volatile(
      "{\n.reg .b32 to, full;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 full, %1, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %2, [full];\n}\n" ::"r"(smem_u32(mine)),
      "r"(smem_u32(bar)), "r"(value), "r"(rank)
      : "memory");
}
__device__ __forceinline__ void store_remote(float* mine, int rank, float value, uint64_t* bar) {
  store_remote(reinterpret_cast<uint32_t*>(mine), rank, __float_as_uint(value), bar);
}
__device__ __forceinline__ void store_remote(uint2* mine, int rank, uint2 value, uint64_t* bar) {
  asm volatile(
      "{\n.reg .b32 to, full;\nmapa.shared::cluster.u32 to, %0, %4;\nmapa.shared::cluster.u32 full, %1, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [to], {%2, %3}, [full];\n}\n" ::"r"(smem_u32(mine)),
      "r"(smem_u32(bar)), "r"(value.x), "r"(value.y), "r"(rank)
      : "memory");
}

}  // namespace ptx
