// Attention within the images of a packed sequence: heads of 72 values, bf16, wgmma.
//
// Queries, keys and values lie as [3][heads][9][capacity][8]: for each of a head's nine groups of 8 values all tokens,
// 16 bytes each. 128 tokens of a group are one piece of 2048 bytes, which is what wgmma takes without a swizzle: core
// matrices of 8 tokens by 8 values, 128 bytes each, K-major for queries and keys, MN-major for values. So any token may
// begin a tile, the copy engine needs no tensor maps, and products over a head's 72 values take a tenth group of zeros
// that only shared memory has.
//
// A block takes one tile of 192 queries after another, as packed_attention.py dealt them out; of a tile that
// several blocks have a part of, each leaves sums, which `join` makes one. A thread feeds a block with tiles of 128
// keys and values; each of three warpgroups keeps 64 queries' sums. While a warpgroup's exponentials run, its
// product with the values of the tile before and the other warpgroups' products do too (Shah et al. 2024, arXiv
// 2407.08608). With two warpgroups of more registers a step took a quarter longer; a pitch that meets all banks,
// scores kept unscaled until they grow and more independent sums changed it by less than 1 %.
#pragma once
#include "common/csrc/wgmma.cuh"

namespace vision {

using namespace ptx;

constexpr int kHead = 72, kParts = kHead / 8, kPadded = kParts + 1;
constexpr int kGroups = 3, kStages = 4, kQueries = 64 * kGroups, kKeys = 128, kThreads = 128 * (1 + kGroups);
constexpr int kKeyBytes = kParts * kKeys * 16;

// Up to 192 queries of a head and what they attend to, tokens of the pack; `slot` is -1 where that is all of it.
struct Part {
  int query, queries, key, keys, head, slot;
};

// A tile whose parts lie in neighbouring slots.
struct Joined {
  int query, queries, head, slot, slots;
};

// A part's sums: of weights times values, relative to the largest scaled score of the row, and of the weights.
struct Sums {
  float values[kQueries][kHead], most[kQueries], weights[kQueries];
};

struct Arguments {
  const __nv_bfloat16* packed;  // [3][heads][9][capacity][8]
  const Part* parts;
  const int* starts;   // [blocks + 1]: where each block's parts begin
  __nv_bfloat16* out;  // [tokens][heads][72]
  Sums* sums;          // [slots]
  int heads, capacity;
  float scale;  // softmax_scale / ln 2
};

struct Memory {
  alignas(128) unsigned char q[kPadded][kQueries * 16];
  alignas(128) unsigned char k[kStages][kPadded][kKeys * 16];
  alignas(128) unsigned char v[kStages][kParts][kKeys * 16];
  float kept[128 * kGroups];
  alignas(8) uint64_t q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

// Registers of a feeding and of a multiplying thread; more than the launch has, and the block would wait for ever.
constexpr int kFeedRegisters = 32, kMultiplyRegisters = 160;
static_assert(128 * (kFeedRegisters + kGroups * kMultiplyRegisters) <= 65536 / kThreads / 8 * 8 * kThreads,
              "setmaxnreg would not return");

// Descriptor without swizzle. K-major: `leading` from 8 values to the next 8, `stride` from 8 rows to the next 8.
// MN-major: `leading` from 8 rows to the next 8 along K, `stride` from 8 values to the next 8.
__device__ __forceinline__ uint64_t plain_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return (uint64_t(stride >> 4) << 32) | (uint64_t(leading >> 4) << 16) | uint64_t((address & 0x3FFFF) >> 4);
}

// d (+)= A[64, 16] B[128, 16]^T, both K-major in shared memory; accumulate 0 overwrites d.
__device__ __forceinline__ void scores_step(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PTX_S64 "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
      : PTX_D32(d, 0), PTX_D32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

// d += A[64, 16] B[16, 72], A in registers, B MN-major in shared memory.
__device__ __forceinline__ void values_step(float (&d)[36], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {" PTX_S36
               "}, {%36, %37, %38, %39}, %40, 1, 1, 1, 1;\n"
               : PTX_D32(d, 0), PTX_D4(d, 32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// One thread: all tiles of this block.
__device__ __forceinline__ void feed(const Arguments& a, Memory& m) {
  const size_t group = size_t(a.capacity) * 8, plane = size_t(a.heads) * kParts * group;
  const int end = a.starts[blockIdx.x + 1];
  int seq = 0, done = 0;
  for (int item = a.starts[blockIdx.x]; item < end; ++item, ++done) {
    const Part tile = a.parts[item];
    const __nv_bfloat16* head = a.packed + size_t(tile.head) * kParts * group;
    if (done) mbar_wait(&m.q_empty, (done - 1) & 1);
    mbar_arrive_expect_tx(&m.q_full, kParts * kQueries * 16);
#pragma unroll 1
    for (int i = 0; i < kParts; ++i)
      bulk_load(m.q[i], head + i * group + size_t(tile.query) * 8, kQueries * 16, &m.q_full, kEvictNormal);
#pragma unroll 1
    for (int first = 0; first < tile.keys; first += kKeys, ++seq) {
      const int st = seq % kStages;
      const __nv_bfloat16* keys = head + plane + size_t(tile.key + first) * 8;
      if (seq >= kStages) mbar_wait(&m.k_empty[st], (seq / kStages - 1) & 1);
      mbar_arrive_expect_tx(&m.k_full[st], kKeyBytes);
#pragma unroll 1
      for (int i = 0; i < kParts; ++i) bulk_load(m.k[st][i], keys + i * group, kKeys * 16, &m.k_full[st], kEvictNormal);
      if (seq >= kStages) mbar_wait(&m.v_empty[st], (seq / kStages - 1) & 1);
      mbar_arrive_expect_tx(&m.v_full[st], kKeyBytes);
#pragma unroll 1
      for (int i = 0; i < kParts; ++i)
        bulk_load(m.v[st][i], keys + plane + i * group, kKeys * 16, &m.v_full[st], kEvictNormal);
    }
  }
}

// A lane has rows g and g + 8 of its warp's 16: values 8 c + 2 t, 8 c + 2 t + 1 at [4 c], [4 c + 1] and [4 c + 2],
// [4 c + 3], for g = lane / 4 and t = lane % 4.
// Volatile, so that the compiler leaves it before the wait for the values' product.
__device__ __forceinline__ float exponential(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Softmax {
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};

  // Scores become weights; returns in `factor` by what the sums so far shrink.
  __device__ __forceinline__ void step(float (&s)[64], float (&factor)[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most_here = most[r];
#pragma unroll
      for (int c = 0; c < 16; ++c) most_here = fmaxf(most_here, fmaxf(s[4 * c + 2 * r], s[4 * c + 2 * r + 1]));
      most_here = fmaxf(most_here, __shfl_xor_sync(0xffffffff, most_here, 1));
      most_here = fmaxf(most_here, __shfl_xor_sync(0xffffffff, most_here, 2));
      factor[r] = exponential((most[r] - most_here) * scale);
      most[r] = most_here;
      const float shift = most_here * scale;
      float total = 0.f, other = 0.f;
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        s[4 * c + 2 * r] = exponential(fmaf(s[4 * c + 2 * r], scale, -shift));
        s[4 * c + 2 * r + 1] = exponential(fmaf(s[4 * c + 2 * r + 1], scale, -shift));
        total += s[4 * c + 2 * r];
        other += s[4 * c + 2 * r + 1];
      }
      sum[r] = sum[r] * factor[r] + (total + other);
    }
  }
};

__device__ __forceinline__ void attend(const Arguments& a, Memory& m) {
  const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t queries = plain_descriptor(smem_u32(m.q) + group * 1024, kQueries * 16, 128);
  // Warpgroups issue their products in turn, so that they do not all wait for the tensor cores, then all for the
  // exponentials. Barriers 1 to 3; the first turn is the first warpgroup's.
  auto my_turn = [&] { named_sync(1 + group, 256); };
  auto next_turn = [&] { named_arrive(1 + (group + 1) % kGroups, 256); };
  if (group == kGroups - 1) next_turn();
  const int end = a.starts[blockIdx.x + 1];
  int seq = 0, done = 0;
  for (int item = a.starts[blockIdx.x]; item < end; ++item, ++done) {
    const int keys = a.parts[item].keys, steps = (keys + kKeys - 1) / kKeys;
    mbar_wait(&m.q_full, done & 1);
    float s[64], o[36], factor[2];
    uint32_t p[32];
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < 36; ++i) o[i] = 0.f;

    auto scores = [&](int at) {
      const uint64_t columns = plain_descriptor(smem_u32(m.k[at % kStages]), kKeys * 16, 128);
      mbar_wait(&m.k_full[at % kStages], (at / kStages) & 1);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kPadded / 2; ++i)
        scores_step(s, queries + i * (2 * kQueries * 16 >> 4), columns + i * (2 * kKeys * 16 >> 4), i > 0);
      wgmma_commit();
    };
    auto values = [&](int at) {
      const uint64_t rows = plain_descriptor(smem_u32(m.v[at % kStages]), 128, kKeys * 16);
      mbar_wait(&m.v_full[at % kStages], (at / kStages) & 1);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) values_step(o, p + 4 * i, rows + i * (256 >> 4));
      wgmma_commit();
    };
    auto release = [&](uint64_t* barrier) {
      if (threadIdx.x % 128 == 0) mbar_arrive(barrier);
    };
    auto pack = [&] {
#pragma unroll
      for (int i = 0; i < 32; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    };
    auto mask = [&](int step) {  // keys of the tile after the image's last one
      const int left = keys - step * kKeys - 2 * (lane & 3);
#pragma unroll
      for (int i = 0; i < 64; ++i)
        if (i / 4 * 8 + (i & 1) >= left) s[i] = -INFINITY;
    };

    my_turn();
    scores(seq);
    next_turn();
    wgmma_wait<0>();
    fence_regs(s);
    release(&m.k_empty[seq % kStages]);
    if (keys < kKeys) mask(0);
    softmax.step(s, factor, a.scale);
    pack();
    for (int i = 1; i < steps; ++i, ++seq) {
      my_turn();
      scores(seq + 1);
      values(seq);
      next_turn();
      wgmma_wait<1>();
      fence_regs(s);
      release(&m.k_empty[(seq + 1) % kStages]);
      if (i == steps - 1 && keys < steps * kKeys) mask(i);
      softmax.step(s, factor, a.scale);
      // A store of what all exponentials make: without it the compiler waits for the product first.
      asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(smem_u32(&m.kept[threadIdx.x - 128])),
                   "f"(softmax.sum[0] + softmax.sum[1])
                   : "memory");
      wgmma_wait<0>();
      fence_regs(o);
      release(&m.v_empty[seq % kStages]);
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        o[4 * c] *= factor[0], o[4 * c + 1] *= factor[0];
        o[4 * c + 2] *= factor[1], o[4 * c + 3] *= factor[1];
      }
      pack();
    }
    release(&m.q_empty);
    values(seq);
    wgmma_wait<0>();
    fence_regs(o);
    release(&m.v_empty[seq % kStages]);
    ++seq;

    const Part tile = a.parts[item];  // read once more: no register holds it through the steps
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = softmax.sum[r];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const int row = group * 64 + warp * 16 + r * 8 + lane / 4;
      if (row >= tile.queries) continue;
      if (tile.slot >= 0) {
        Sums& to = a.sums[tile.slot];
#pragma unroll
        for (int c = 0; c < kParts; ++c)
          *reinterpret_cast<float2*>(&to.values[row][8 * c + 2 * (lane & 3)]) =
              make_float2(o[4 * c + 2 * r], o[4 * c + 2 * r + 1]);
        if ((lane & 3) == 0) to.most[row] = softmax.most[r] * a.scale, to.weights[row] = sum;
        continue;
      }
      const float inverse = 1.f / sum;
      __nv_bfloat16* to = a.out + (size_t(tile.query + row) * a.heads + tile.head) * kHead + 2 * (lane & 3);
#pragma unroll
      for (int c = 0; c < kParts; ++c)
        *reinterpret_cast<uint32_t*>(to + 8 * c) =
            pack_bf16(o[4 * c + 2 * r] * inverse, o[4 * c + 2 * r + 1] * inverse);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) attention(const Arguments a) {
  extern __shared__ __align__(128) unsigned char raw[];
  auto& m = *reinterpret_cast<Memory*>(raw);
  // The tenth group of values, which nobody writes again.
  for (int i = threadIdx.x; i < kQueries; i += blockDim.x)
    reinterpret_cast<uint4*>(m.q[kParts])[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < kStages * kKeys; i += blockDim.x)
    reinterpret_cast<uint4*>(m.k[i / kKeys][kParts])[i % kKeys] = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
  if (threadIdx.x == 0) {
    mbar_init(&m.q_full, 1);
    mbar_init(&m.q_empty, kGroups);
    for (int i = 0; i < kStages; ++i) {
      mbar_init(&m.k_full[i], 1);
      mbar_init(&m.v_full[i], 1);
      mbar_init(&m.k_empty[i], kGroups);
      mbar_init(&m.v_empty[i], kGroups);
    }
    fence_mbar_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    reg_dealloc<kFeedRegisters>();
    if (threadIdx.x == 0) feed(a, m);
  } else {
    reg_alloc<kMultiplyRegisters>();
    attend(a, m);
  }
}

struct JoinArguments {
  const Joined* joined;
  const Sums* sums;
  __nv_bfloat16* out;  // [tokens][heads][72]
  int heads;
};

// Rows of 36 pairs of values, a thread each; in the order of the keys, so that the same bits come out each time.
constexpr int kJoinRows = 8, kJoinThreads = kJoinRows * kHead / 2;

__global__ void __launch_bounds__(kJoinThreads) join(const JoinArguments a) {
  const Joined tile = a.joined[blockIdx.x];
  const int row = blockIdx.y * kJoinRows + threadIdx.x / (kHead / 2), pair = threadIdx.x % (kHead / 2);
  if (row >= tile.queries) return;
  const Sums* sums = a.sums + tile.slot;
  float most = -INFINITY, weights = 0.f;
  for (int i = 0; i < tile.slots; ++i) most = fmaxf(most, sums[i].most[row]);
  float2 values = make_float2(0.f, 0.f);
  for (int i = 0; i < tile.slots; ++i) {
    const float factor = exp2f(sums[i].most[row] - most);
    const float2 own = reinterpret_cast<const float2*>(sums[i].values[row])[pair];
    weights = fmaf(factor, sums[i].weights[row], weights);
    values.x = fmaf(factor, own.x, values.x), values.y = fmaf(factor, own.y, values.y);
  }
  const float inverse = 1.f / weights;
  uint32_t* to = reinterpret_cast<uint32_t*>(a.out + (size_t(tile.query + row) * a.heads + tile.head) * kHead);
  to[pair] = pack_bf16(values.x * inverse, values.y * inverse);
}

struct PackArguments {
  const __nv_bfloat16* qkv;  // [tokens][3][heads][72], rows `stride` values apart
  const float* cos;          // [tokens][36]
  const float* sin;
  __nv_bfloat16* packed;
  int tokens, heads, capacity, stride;
};

// Queries and keys rotated, all three laid out as `attention` reads them; zeros for what is no token. A warp takes
// eight tokens of four neighbouring groups of 8 values: whole sectors on both sides.
__global__ void __launch_bounds__(256) rotate_and_pack(const PackArguments a) {
  const int token = blockIdx.x * 8 + threadIdx.x % 8, groups = 3 * a.heads * kParts;
  const bool real = token < a.tokens;
  for (int item = threadIdx.x / 8; item < groups; item += 32) {
    uint4 value = make_uint4(0, 0, 0, 0);
    if (real) value = __ldcs(reinterpret_cast<const uint4*>(a.qkv + size_t(token) * a.stride) + item);
    if (real && item < 2 * a.heads * kParts) {
      const size_t at = size_t(token) * (kHead / 8) + item % kParts;  // four pairs each
      const float4 c = __ldg(reinterpret_cast<const float4*>(a.cos) + at);
      const float4 s = __ldg(reinterpret_cast<const float4*>(a.sin) + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&value)[i]);
        const float ci = (&c.x)[i], si = (&s.x)[i];
        (&value.x)[i] = pack_bf16(pair.x * ci - pair.y * si, pair.y * ci + pair.x * si);
      }
    }
    if (token < a.capacity) reinterpret_cast<uint4*>(a.packed)[size_t(item) * a.capacity + token] = value;
  }
}

}  // namespace vision
