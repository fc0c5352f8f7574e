// Between attention's first GEMMs and attention itself, at decode: q_b behind its norm, RoPE, W_UK absorbed into the
// queries, the new token's cache entry. A cluster of eight blocks owns a head of up to TOKENS tokens: each block
// computes 24 of the head's 192 rows, passes them to the others through shared memory, and then computes 64 of the 512
// columns of W_UK^T q. All weights are asked for, once for all tokens, before the launch before this one has ended. One
// more cluster stores the entries.
//
// Both products are made on the tensor cores, tokens on the left: a warp has 192 columns of q_b's 24 rows, then 16 of
// the 128 keys, and the warps' sums are added in their order, which no token beside it changes. A sum does not depend
// on the order of columns or keys, so that a lane's 16 bytes of a weight are what several MMAs take from it.
#include "common/csrc/ptx.cuh"
#include "entry.cuh"
#include "linear/csrc/half.cuh"

namespace decode {

constexpr int kInput = 1536, kGroups = kInput / 8;  // columns of q_b, and groups of 8 of them

// The rows of `qkv_a` are kv_stride apart.
struct QueryArguments : EntryArguments {
  const __nv_bfloat16* qkv_a;   // [tokens, 1536 + 576]: q_a | latent before its norm | key before RoPE
  const __nv_bfloat16* q_norm;  // [1536]
  const uint8_t* q_b;           // e4m3 [heads * 192, 1536], or bf16
  const float* q_b_scale;       // [ceil(heads * 192 / 128), 12], null of bf16
  float q_eps;
};

constexpr int kBlocks = 8, kRows = kHead / kBlocks, kWide = kRank / kBlocks;  // of a cluster; of a block
constexpr int kEach = kRows / 8, kTiles = kWide / 8, kPairs = kRope / 2 / kBlocks;
constexpr int kPieces = kGroups / 32;  // of a token, a warp each
constexpr int kCycle = 3;              // rounds after which a warp's pieces are the same ones again, of other tokens
constexpr int kEarlyTokens = 4;        // up to which there are registers for e4m3 weights as float16

template <int TOKENS>
struct QueryMemory {
  union {
    uint4 token[TOKENS][kGroups + 1];  // so that two tokens' columns lie in different banks
    float sums[TOKENS][kWarps][kWide];
  };
  float squares[TOKENS][kPieces], inverse[TOKENS];
  float back[TOKENS][kInput / 128];  // undoes the scale of 128 of a token's columns
  alignas(16) float parts[kWarps][TOKENS][kRows];
  alignas(16) __nv_bfloat16 q[TOKENS][kHead + 16];
};

// The first two and the last two of a lane's four values, each a register of an MMA.
__device__ __forceinline__ uint2 two_pairs(const __nv_bfloat16* at) { return *reinterpret_cast<const uint2*>(at); }

template <bool FP8, int TOKENS>
__global__ void __launch_bounds__(kThreads, 2) query(const QueryArguments a) {
  constexpr int kHalves = TOKENS > 8 ? 2 : 1;  // of an MMA's 16 rows: of tokens
  constexpr int kLine = kInput * (FP8 ? 1 : 2) / 16, kMine = kLine / kWarps, kSteps = kMine / 4;  // in 16 bytes
  constexpr int kRounds = (TOKENS * kPieces + kWarps - 1) / kWarps, kBatch = kRounds < 6 ? kRounds : 6;
  constexpr int kNorms = kRounds < kCycle ? kRounds : kCycle;
  constexpr bool kEarly = FP8 && TOKENS <= kEarlyTokens;
  DECODE_DYNAMIC_SHARED(uint4, raw);
  QueryMemory<TOKENS>& m = *reinterpret_cast<QueryMemory<TOKENS>*>(raw);
  const int rank = blockIdx.x, head = blockIdx.y, first = blockIdx.z * TOKENS;
  const int count = a.tokens - first < TOKENS ? a.tokens - first : TOKENS;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, group = lane / 4, quad = lane % 4;
  if (head == a.heads) {
    pdl_launch();
    if (rank >= count) return;
    pdl_wait();
    for (int t = first + rank; t < first + count; t += kBlocks)
      store_entry(a, t, a.qkv_a + int64_t(t) * a.kv_stride + kInput);
    return;
  }
  cluster_begin();
  const int row = head * kHead + rank * kRows;
  uint4 weight[kEach][kSteps], keys[4], norm[kNorms];
  float scale[kEach][kSteps];
  const uint4* q_b = reinterpret_cast<const uint4*>(a.q_b) + int64_t(row + group) * kLine + warp * kMine + quad;
#pragma unroll
  for (int r = 0; r < kEach; ++r)
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      weight[r][i] = load_early(q_b + r * 8 * kLine + i * 4);
      if constexpr (FP8) scale[r][i] = load_early(a.q_b_scale + (row + r * 8) / 128 * 12 + (warp * 3 + i) / 2);
    }
  const uint4* w_uk = reinterpret_cast<const uint4*>(a.w_uk) +
                      (int64_t(head * kNope + warp * 16 + quad * 4) * kRank + rank * kWide) / 8 + group;
#pragma unroll
  for (int i = 0; i < 4; ++i) keys[i] = load_early(w_uk + i * (kRank / 8));
#pragma unroll
  for (int i = 0; i < kNorms; ++i)
    norm[i] = load_early(reinterpret_cast<const uint4*>(a.q_norm) + (warp + i * kWarps) % kPieces * 32 + lane);
  uint32_t halves[kEarly ? kEach : 1][kEarly ? kSteps : 1][8];
  // There are tokens always, but ptxas would move the conversion behind the wait.
  if (kEarly && count > 0) {
#pragma unroll
    for (int r = 0; r < kEach; ++r)
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) halves[r][i][j] = fp8x2_to_half2((&weight[r][i].x)[j / 2] >> (j % 2 * 16) & 0xffff);
  } else if constexpr (kEarly) {
    for (auto& of_rows : halves)
      for (auto& eight : of_rows)
        for (auto& half : eight) half = 0;
  }
  pdl_wait();
  // What turns this thread's pair, if it has one, is there before the pair is.
  const int turning = thread / kPairs, pair = rank * kPairs + thread % kPairs;
  float c = 0, s = 0;
  if (turning < count) {
    const int at = (first + turning) * (kRope / 2) + pair;
    c = widened(a.cos + at), s = widened(a.sin + at);
  }
#pragma unroll
  for (int base = 0; base < kRounds; base += kBatch) {
    uint4 value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int piece = warp + (base + i) * kWarps, t = piece / kPieces;
      const __nv_bfloat16* x = a.qkv_a + int64_t(first + t) * a.kv_stride;
      value[i] =
          t < count ? __ldcg(reinterpret_cast<const uint4*>(x) + piece % kPieces * 32 + lane) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int piece = warp + (base + i) * kWarps, t = piece / kPieces, v = piece % kPieces * 32 + lane;
      if (t >= TOKENS) continue;
      float x[8];
      widen(value[i], x);
      const float sum = sum_lanes(squares8(x));
      if (lane == 0) m.squares[t][piece % kPieces] = sum;
      const uint4 by = norm[(base + i) % kCycle];
      if constexpr (FP8) {
        float w[8], back;
        widen(by, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= w[j];
        m.token[t][v] = to_halves(x, back);
        if (lane % 16 == 0) m.back[t][v / 16] = back;
      } else {
        m.token[t][v] = normed8(x, 1.f, by);
      }
    }
  }
  __syncthreads();
  pdl_launch();

  if (thread < TOKENS) {
    float squares = 0;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) squares += m.squares[thread][piece];
    m.inverse[thread] = rsqrtf(squares / kInput + a.q_eps);
  }
  const auto given = [&](int h) { return group + h * 8 < TOKENS ? group + h * 8 : TOKENS - 1; };  // a lane's token
  float total[kEach][4] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    // Of 64 columns in e4m3, of which four lanes take 16 each, or 32 in bf16, of which they take 8.
    uint4 x[2][FP8 ? 2 : 1] = {};
    float factor[2] = {};
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const uint4* token = m.token[given(h)];
      if constexpr (FP8) {
        const int v = (warp * 3 + i) * 8 + quad * 2;
        x[h][0] = token[v], x[h][1] = token[v + 1];
        factor[h] = m.back[given(h)][(warp * 3 + i) / 2];
      } else {
        x[h][0] = token[(warp * kSteps + i) * 4 + quad];
      }
    }
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const uint32_t* w = &weight[r][i].x;
      if constexpr (FP8) {
        float sum[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t *one = &x[0][j / 2].x + j % 2 * 2, *other = &x[1][j / 2].x + j % 2 * 2;
          uint32_t b[2];
#pragma unroll
          for (int k = 0; k < 2; ++k)
            if constexpr (kEarly) b[k] = halves[r][i][2 * j + k];
            else b[k] = fp8x2_to_half2(w[j] >> (k * 16) & 0xffff);
          mma_f16(sum, one[0], other[0], one[1], other[1], b[0], b[1]);
        }
#pragma unroll
        for (int d = 0; d < 2 * kHalves; ++d) total[r][d] += sum[d] * (scale[r][i] * factor[d / 2]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint32_t *one = &x[0][0].x + j, *other = &x[1][0].x + j;
          ptx::mma_bf16(total[r], one[0], other[0], one[1], other[1], w[j], w[j + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h)
    if (group + h * 8 < TOKENS)
#pragma unroll
      for (int r = 0; r < kEach; ++r)
        reinterpret_cast<float2*>(m.parts[warp][group + h * 8])[r * 4 + quad] =
            make_float2(total[r][2 * h], total[r][2 * h + 1]);
  __syncthreads();
  cluster_wait();  // the others have begun, so that their shared memory is theirs
  // Each warp tells one of the cluster's blocks of this one's rows.
  QueryMemory<TOKENS>& other = *map_shared_rank(&m, warp);
#pragma unroll 1
  for (int item = lane; item < count * (kRows / 2); item += 32) {
    const int t = item / (kRows / 2), two = item % (kRows / 2);
    float low = 0, high = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 part = reinterpret_cast<const float2*>(m.parts[w][t])[two];
      low += part.x, high += part.y;
    }
    reinterpret_cast<__nv_bfloat162*>(other.q[t] + rank * kRows)[two] =
        __floats2bfloat162_rn(low * m.inverse[t], high * m.inverse[t]);
  }
  cluster_arrive();
  cluster_wait();

  const auto out = [&](int t) { return a.out + (int64_t(first + t) * a.heads + head) * kEntry; };
  if (turning < count) {
    const __nv_bfloat16* two = m.q[turning] + kNope + 2 * pair;
    const float even = __bfloat162float(two[0]), odd = __bfloat162float(two[1]);
    reinterpret_cast<__nv_bfloat162*>(out(turning) + kRank)[pair] =
        __floats2bfloat162_rn(even * c - odd * s, odd * c + even * s);
  }
  uint2 x[2] = {};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) x[h] = two_pairs(m.q[given(h)] + warp * 16 + quad * 4);
  // A lane's columns of tile j are its own eight's j-th.
  float column[kTiles][4] = {};
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    uint32_t b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = (&keys[2 * i].x)[j / 2], high = (&keys[2 * i + 1].x)[j / 2];
      b[i] = j % 2 ? low >> 16 | (high & 0xffff0000u) : (low & 0xffffu) | high << 16;
    }
    ptx::mma_bf16(column[j], x[0].x, x[1].x, x[0].y, x[1].y, b[0], b[1]);
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h)
    if (group + h * 8 < TOKENS) {
      float* to = m.sums[group + h * 8][warp] + quad * 16;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) to[j] = column[j][2 * h], to[8 + j] = column[j][2 * h + 1];
    }
  __syncthreads();
#pragma unroll 1
  for (int item = thread; item < count * (kWide / 2); item += kThreads) {
    const int t = item / (kWide / 2), two = item % (kWide / 2);
    float low = 0, high = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 part = reinterpret_cast<const float2*>(m.sums[t][w])[two];
      low += part.x, high += part.y;
    }
    reinterpret_cast<__nv_bfloat162*>(out(t) + rank * kWide)[two] = __floats2bfloat162_rn(low, high);
  }
}

template <bool FP8, int TOKENS>
int start_query(const QueryArguments& a, void* stream) {
  return launch(query<FP8, TOKENS>, dim3(kBlocks, a.heads + 1, (a.tokens + TOKENS - 1) / TOKENS), kThreads,
                sizeof(QueryMemory<TOKENS>), a, stream, kBlocks);
}

// Of more than four tokens two clusters share a head where q_b has half the bytes.
template <bool FP8>
int by_tokens(const QueryArguments& a, void* stream) {
  const int each = FP8 ? (a.tokens + 1) / 2 : a.tokens;
  if (a.tokens == 1) return start_query<FP8, 1>(a, stream);
  if (each <= 4) return start_query<FP8, 4>(a, stream);
  if (FP8 || each <= 8) return start_query<FP8, 8>(a, stream);
  return start_query<FP8, FP8 ? 8 : 16>(a, stream);
}

}  // namespace decode

extern "C" int kimi_query(const decode::QueryArguments* a, void* stream) {
  return a->q_b_scale == nullptr ? decode::by_tokens<false>(*a, stream) : decode::by_tokens<true>(*a, stream);
}
