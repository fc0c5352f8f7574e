// dense_gemm.cuh's GEMM of a few tokens, bit for bit, with the residual sum and norm before it optional. There a block
// of a cluster multiplies 64 rows of W by a part of their columns. Here the 64 rows of an instruction are 64 / PARTS
// rows by all parts of their columns, and its columns are the tokens' parts: of what it makes, the sums of a row's and
// a token's part with the same number are wanted. So a block has whole rows, and no block waits for another one.
#include "common/csrc/decode.cuh"
#include "common/csrc/few_bf16.cuh"
#include "common/csrc/launch.cuh"
#include "rowwise/csrc/norm.cuh"

namespace few {

using namespace few_bf16;

constexpr int kThreads = 288;  // the last warp asks for weights, the first four multiply, all others make tokens
constexpr int kMakers = 256;
constexpr int kMostTokens = 2, kEach = 4;  // groups of eight values a thread, of a token

struct DenseArguments {
  const __nv_bfloat16* x;      // [tokens, columns], rows x_stride values apart
  const __nv_bfloat16* delta;  // [tokens, columns], to be added to x, or null
  const __nv_bfloat16* norm;   // [columns] or null: the GEMM is of RMSNorm(x), or RMSNorm(x + delta)
  __nv_bfloat16* total;        // x + delta
  __nv_bfloat16* out;          // [tokens, rows]
  int tokens, rows, columns, x_stride;
  int parts;  // of the columns, summed apart: 1, 2, 4 or 8
  int ring;   // units that are on their way at most
  float eps;
};

// N: parts times tokens, at least eight: rows of the right operand, part after part.
template <int N>
struct DenseMemory {
  float sums[64][N / 2], squares[kMostTokens][32], inverse[kMostTokens];
  alignas(8) uint64_t full[32], empty[32];
  static __host__ __device__ int before(int ring, int stages) { return ring * kUnitBytes + stages * N * 128; }
};

template <int N>
__global__ void __launch_bounds__(kThreads, 1)
    few_dense(const __grid_constant__ CUtensorMap weights, const __grid_constant__ DenseArguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const int stages = a.columns / 64 / a.parts;  // blocks of 64 columns of a part
  unsigned char* const tokens = raw + a.ring * kUnitBytes;
  DenseMemory<N>& m = *reinterpret_cast<DenseMemory<N>*>(raw + DenseMemory<N>::before(a.ring, stages));
  const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(decode::kAll, thread / 32, 0);
  const int kept = 64 / a.parts, first = blockIdx.x * kept;
  const int each = a.tokens;  // rows that a part's tokens have
  if (warp == kMakers / 32) {
    auto request = [&](int i) {
      const int st = i % a.ring;
      mbar_arrive_expect_tx(&m.full[st], kUnitBytes);
      tma_load_4d(smem_u32(raw + st * kUnitBytes), &weights, &m.full[st], 0, first, i, 0, kEvictFirst);
    };
    if (lane == 0) {
      if (smem_u32(raw) & 1023) __trap();
      open_ring(m.full, m.empty, a.ring, stages, request);
    }
    named_arrive(1, kMakers + 32);
    if (lane == 0) feed_ring(m.empty, a.ring, stages, request);
    return;
  }
  const int groups = a.columns / 8, of_part = groups / a.parts;
  uint4 norm[kEach] = {};
  if (a.norm != nullptr)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (thread + i * kMakers < groups)
        norm[i] = decode::load_early(reinterpret_cast<const uint4*>(a.norm) + thread + i * kMakers);
  decode::pdl_wait();
  decode::pdl_launch();
  for (int t = 0; t < a.tokens; ++t) {
    const int64_t row = int64_t(t) * groups;
    uint4 value[kEach], delta[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int v = thread + i * kMakers;
      value[i] = delta[i] = make_uint4(0, 0, 0, 0);
      if (v >= groups) continue;
      value[i] = __ldcg(reinterpret_cast<const uint4*>(a.x + int64_t(t) * a.x_stride) + v);
      if (a.delta != nullptr) delta[i] = __ldcg(reinterpret_cast<const uint4*>(a.delta) + row + v);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int v = thread + i * kMakers;
      if (i * kMakers >= groups) break;
      if (a.norm != nullptr) {
        float wide[8];
        decode::sum8(value[i], delta[i], wide);  // zeros where there is no delta
        if (a.delta != nullptr && blockIdx.x == 0 && v < groups)
          reinterpret_cast<uint4*>(a.total)[row + v] = decode::round8(wide);
        const float sum = decode::sum_lanes(decode::squares8(wide));
        if (lane == 0) m.squares[t][v / 32] = sum;
        value[i] = decode::normed8(wide, 1.f, norm[i]);
      }
      if (v >= groups) continue;
      put_eight<N>(tokens, v % of_part, v / of_part * each + t, value[i]);
    }
  }
  fence_proxy_async();
  named_sync(1, kMakers + 32);
  if (warp >= 4) return;

  float acc[N / 2];
  multiply_units<N>(acc, raw, tokens, m.full, m.empty, a.ring, stages);
  if (a.norm != nullptr) {
    const int sums = (groups + 31) / 32;
    for (int t = warp; t < a.tokens; t += 4) {
      const float whole = decode::sum_lanes(lane < sums ? m.squares[t][lane] : 0.f);
      if (lane == 0) m.inverse[t] = rsqrtf(whole / a.columns + a.eps);
    }
  }
  keep_own<N>(acc, m.sums, each, a.tokens, [&](int row) { return row / kept; });
  named_sync(2, 128);
  for (int i = thread; i < kept * a.tokens; i += 128) {
    const int t = i / kept, row = i % kept;
    float sum = 0.f;
    for (int p = 0; p < a.parts; ++p) sum += m.sums[p * kept + row][t];
    if (a.norm != nullptr) sum *= m.inverse[t];
    a.out[int64_t(t) * a.rows + first + row] = __float2bfloat16(sum);
  }
}

template <int N>
int start(const CUtensorMap& weights, const DenseArguments& a, cudaStream_t stream) {
  const size_t bytes = DenseMemory<N>::before(a.ring, a.columns / 64 / a.parts) + sizeof(DenseMemory<N>);
  if (bytes > host::kMaxShared) return host::kNoInstance;
  return host::launch(few_dense<N>, {dim3(a.rows * a.parts / 64), kThreads, bytes, stream, true, 1, host::kWholeShare},
                      weights, a);
}

}  // namespace few

// Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_few_dense(const void* x, const void* delta, const void* norm, void* total, const void* weight,
                              void* out, int tokens, int rows, int columns, int x_stride, int parts, int ring,
                              float eps, void* stream) {
  const few::DenseArguments a{static_cast<const __nv_bfloat16*>(x),
                              static_cast<const __nv_bfloat16*>(delta),
                              static_cast<const __nv_bfloat16*>(norm),
                              static_cast<__nv_bfloat16*>(total),
                              static_cast<__nv_bfloat16*>(out),
                              tokens,
                              rows,
                              columns,
                              x_stride,
                              parts,
                              ring,
                              eps};
  if (64 % parts || parts > 8 || rows % (64 / parts) || columns % (64 * parts) || tokens > few::kMostTokens ||
      columns > 8 * few::kEach * few::kMakers || ring > 32)
    return host::kNoInstance;
  CUtensorMap weights;
  if (int rc = host::encode_parts(&weights, weight, rows, columns, parts, 64 / parts)) return rc;
  const auto s = static_cast<cudaStream_t>(stream);
  return parts * tokens <= 8 ? few::start<8>(weights, a, s) : few::start<16>(weights, a, s);
}
