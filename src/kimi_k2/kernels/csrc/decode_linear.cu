// y = RMSNorm(x + delta) W^T for one to four tokens, norm and delta optional: W is read once, ROWS rows by LANES lanes of
// a warp. W is e4m3 with one float32 scale a 128x128 block. All of a lane's loads are issued before the tokens are
// waited for; their statistics are computed meanwhile, so that they hide behind the weights' latency.
#include "decode_norm.cuh"

namespace decode {

struct LinearArguments {
    const __nv_bfloat16* x;
    const __nv_bfloat16* delta;
    const uint8_t* weight;
    const float* scale;
    const __nv_bfloat16* norm;
    __nv_bfloat16* out;
    __nv_bfloat16* total;  // x + delta, written by the first block
    int tokens, rows, columns;
    float eps;
};

// Tokens to shared memory, after the launches before this one; ends with a barrier.
template <int TOKENS>
__device__ __forceinline__ void prepare(const LinearArguments& a, uint4* token, float (&sums)[TOKENS][kWarps]) {
    const int thread = threadIdx.x, groups = a.columns / 8;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float sum = 0;
        for (int v = thread; v < groups; v += kThreads) {
            uint4 value = make_uint4(0, 0, 0, 0);
            if (t < a.tokens) {
                const int at = t * groups + v;
                value = __ldcg(reinterpret_cast<const uint4*>(a.x) + at);
                if (a.delta != nullptr) {
                    value = add8(value, __ldcg(reinterpret_cast<const uint4*>(a.delta) + at));
                    if (blockIdx.x == 0) reinterpret_cast<uint4*>(a.total)[at] = value;
                }
            }
            sum += squares8(value);
            token[t * groups + place_of(v, a.columns)] = value;
        }
        if (a.norm != nullptr) {
            sum = sum_lanes(sum);
            if (thread % 32 == 0) sums[t][thread / 32] = sum;
        }
    }
    __syncthreads();
    if (a.norm == nullptr) return;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += sums[t][w];
        const float inverse = rsqrtf(sum / a.columns + a.eps);
        for (int v = thread; v < groups; v += kThreads) {
            uint4& value = token[t * groups + place_of(v, a.columns)];
            value = normed8(value, inverse, __ldg(reinterpret_cast<const uint4*>(a.norm) + v));
        }
    }
    __syncthreads();
}

// LOADS 16-byte loads a lane and row: columns = 16 * LANES * LOADS. Rows of a warp are a multiple of ROWS apart from a
// scale block's end.
template <int TOKENS, int LOADS, int LANES, int ROWS>
__global__ void __launch_bounds__(kThreads, 2) linear(const LinearArguments a) {
    extern __shared__ uint4 token[];
    __shared__ float sums[TOKENS][kWarps];
    const int thread = threadIdx.x, lane = thread % LANES;
    const int row = (blockIdx.x * (kThreads / LANES) + thread / LANES) * ROWS;
    uint4 codes[ROWS][LOADS];
    const uint8_t* weights = a.weight + int64_t(row) * a.columns + lane * 16;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            codes[r][i] = row + r < a.rows ? load_once(weights + int64_t(r) * a.columns + i * LANES * 16)
                                           : make_uint4(0, 0, 0, 0);
    // Scales, too, come from memory: lane l of the warp keeps blocks l and 32 + l of its rows.
    const float* scales = a.scale + (row < a.rows ? row / 128 : 0) * (a.columns / 128);
    const int mine = thread % 32, blocks = a.columns / 128;
    const float first = mine < blocks ? __ldg(scales + mine) : 0.f;
    const float second = mine + 32 < blocks ? __ldg(scales + mine + 32) : 0.f;
    wait_for_previous();
    let_next_start();
    prepare<TOKENS>(a, token, sums);

    float total[TOKENS][ROWS] = {};
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int chunk = i * LANES + lane;
        const float scale = __shfl_sync(kAll, i * LANES < 256 ? first : second, chunk / 8 % 32);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            float x[16];
            take16(token + t * (a.columns / 8), a.columns, chunk, x);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) total[t][r] += dot16(codes[r][i], x) * scale;
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float sum = sum_lanes<LANES>(total[t][r]);
            if (lane == 0 && row + r < a.rows && t < a.tokens)
                a.out[int64_t(t) * a.rows + row + r] = __float2bfloat16(sum);
        }
}

template <int TOKENS, int LOADS, int LANES, int ROWS>
int start(const LinearArguments& a, void* stream) {
    const int rows = kThreads / LANES * ROWS;
    return launch(linear<TOKENS, LOADS, LANES, ROWS>, dim3((a.rows + rows - 1) / rows), kThreads,
                  size_t(TOKENS) * a.columns * 2, a, stream);
}

template <int TOKENS>
int by_columns(const LinearArguments& a, void* stream) {
    switch (a.columns) {
        case 256: return start<TOKENS, 1, 16, 4>(a, stream);
        case 512: return start<TOKENS, 1, 32, 4>(a, stream);
        case 1024: return start<TOKENS, 2, 32, 4>(a, stream);
        case 1536: return start<TOKENS, 3, 32, 1>(a, stream);
        case 2048: return start<TOKENS, 4, 32, 2>(a, stream);
        case 2304: return start<TOKENS, 9, 16, 1>(a, stream);
        case 4096: return start<TOKENS, 8, 32, 1>(a, stream);
        case 7168: return start<TOKENS, 14, 32, 1>(a, stream);
        default: return 1000;
    }
}

}  // namespace decode

extern "C" int kimi_linear_decode(const void* x, const void* delta, const void* weight, const void* scale,
                                  const void* norm, void* out, void* total, int tokens, int rows, int columns,
                                  float eps, void* stream) {
    const decode::LinearArguments a{
        static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(delta),
        static_cast<const uint8_t*>(weight),  static_cast<const float*>(scale),
        static_cast<const __nv_bfloat16*>(norm), static_cast<__nv_bfloat16*>(out),
        static_cast<__nv_bfloat16*>(total),   tokens, rows, columns, eps};
    if (tokens == 1) return decode::by_columns<1>(a, stream);
    if (tokens == 2) return decode::by_columns<2>(a, stream);
    if (tokens <= 4) return decode::by_columns<4>(a, stream);
    return 1000;
}
