// Sum over the GPUs of a host for decode sizes, in one launch. Each rank pushes its part into a mailbox of its own in
// every peer's memory and adds, in the order of ranks, what has arrived in its own: one way over NVLink is all it waits
// for.
//
// Two sets of mailboxes take turns. A rank writes to a set again two calls later: it then has every peer's part of the
// call in between, which a peer sends only after its launch before, and so its reading of that set, has ended.
#include "all_reduce_ptx.cuh"
#include "common/csrc/decode.cuh"

namespace decode {

constexpr int kReduceThreads = 128, kMaxRanks = 8;

struct ReduceArguments {
  const uint2* x;          // this rank's part, packets of 4 bf16
  uint2* out;              // [packets]
  uint32_t* calls;         // calls so far, one count for each block
  uint4* mail[kMaxRanks];  // the mailboxes [2, ranks, capacity] of this rank, the next one and so on around
  int packets, capacity, rank, ranks;
};

template <int RANKS>
__global__ void __launch_bounds__(kReduceThreads) all_reduce(const ReduceArguments a) {
  const int packet = blockIdx.x * kReduceThreads + threadIdx.x;
  const bool here = packet < a.packets;
  pdl_wait();
  pdl_launch();
  const uint32_t call = __ldcg(a.calls + blockIdx.x) + 1;
  uint2 part[RANKS];
  const uint2 mine = here ? __ldcg(a.x + packet) : make_uint2(0, 0);
  const int64_t set = int64_t(call & 1) * RANKS * a.capacity;
  if (here) {
#pragma unroll
    for (int step = 1; step < RANKS; ++step)
      post(a.mail[step] + set + int64_t(a.rank) * a.capacity + packet, mine, call);
    const uint4* box = a.mail[0] + set + packet;
    const Patience patience;
    bool complete = false;
    while (!complete) {
      complete = true;
#pragma unroll
      for (int from = 0; from < RANKS; ++from)
        if (from != a.rank) complete &= arrived(box + int64_t(from) * a.capacity, call, part[from]);
      if (!complete) patience.check();
    }
    float sum[4] = {};
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
      const uint2 words = from == a.rank ? mine : part[from];
      sum[0] += low(words.x), sum[1] += high(words.x), sum[2] += low(words.y), sum[3] += high(words.y);
    }
    __nv_bfloat162* out = reinterpret_cast<__nv_bfloat162*>(a.out + packet);
    out[0] = __floats2bfloat162_rn(sum[0], sum[1]);
    out[1] = __floats2bfloat162_rn(sum[2], sum[3]);
  }
  __syncthreads();
  if (threadIdx.x == 0) a.calls[blockIdx.x] = call;
}

template <int RANKS>
int start(const ReduceArguments& a, void* stream) {
  const int blocks = (a.packets + kReduceThreads - 1) / kReduceThreads;
  return launch(all_reduce<RANKS>, dim3(blocks), kReduceThreads, 0, a, stream);
}

}  // namespace decode

extern "C" int kimi_all_reduce(const decode::ReduceArguments* a, void* stream) {
  switch (a->ranks) {
    case 2: return decode::start<2>(*a, stream);
    case 3: return decode::start<3>(*a, stream);
    case 4: return decode::start<4>(*a, stream);
    case 5: return decode::start<5>(*a, stream);
    case 6: return decode::start<6>(*a, stream);
    case 7: return decode::start<7>(*a, stream);
    case 8: return decode::start<8>(*a, stream);
    default: return host::kNoInstance;
  }
}
