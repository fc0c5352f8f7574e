// y = RMSNorm(x + delta) W^T for one to four tokens, norm and delta optional: W is read once, ROWS rows by LANES lanes of
// a warp. W is e4m3 with one float32 scale a 128x128 block, or bf16. All of a lane's loads are issued before the tokens are
// waited for; their statistics are computed meanwhile, so that they hide behind the weights' latency.
#include "decode_tokens.cuh"

namespace decode {

// LOADS 16-byte loads a lane and row: columns = 16 * LANES * LOADS. A warp's rows lie in one scale block: their number
// divides 128.
template <int TOKENS, int LOADS, int LANES, int ROWS>
__global__ void __launch_bounds__(kThreads, 2) linear(const LinearArguments a) {
    DECODE_DYNAMIC_SHARED(uint4, token);
    __shared__ float sums[TOKENS][kWarps];
    constexpr int kColumns = LOADS * LANES * 16;
    const int thread = threadIdx.x, lane = thread % LANES;
    const int row = (blockIdx.x * (kThreads / LANES) + thread / LANES) * ROWS;
    uint4 codes[ROWS][LOADS];
    const uint8_t* weights = static_cast<const uint8_t*>(a.weight) + int64_t(row) * a.columns + lane * 16;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            codes[r][i] = row + r < a.rows ? load_once(weights + int64_t(r) * a.columns + i * LANES * 16)
                                           : make_uint4(0, 0, 0, 0);
    // Scales, too, come from memory: lane l of the warp keeps blocks l and 32 + l of its rows.
    const float* scales = a.scale + (row < a.rows ? row / 128 : 0) * (kColumns / 128);
    const int mine = thread % 32, blocks = kColumns / 128;
    const float first = mine < blocks ? __ldg(scales + mine) : 0.f;
    const float second = mine + 32 < blocks ? __ldg(scales + mine + 32) : 0.f;
    request_norm<TOKENS, kColumns>(a, token);
    wait_for_previous();
    prepare<TOKENS, kColumns, true>(a, token, sums);
    let_next_start();

    float total[TOKENS][ROWS] = {};
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int chunk = i * LANES + lane;
        const float scale = __shfl_sync(kAll, i * LANES < 256 ? first : second, chunk / 8 % 32);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            float x[16];
            take16(token + t * (kColumns / 8), kColumns, chunk, x);
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

// bf16 weights: a warp a row, LOADS of 512 bytes, AHEAD of them in flight.
template <int TOKENS, int LOADS, int AHEAD>
__global__ void __launch_bounds__(kThreads, 3) linear_bf16(const LinearArguments a) {
    DECODE_DYNAMIC_SHARED(uint4, token);
    __shared__ float sums[TOKENS][kWarps];
    constexpr int kColumns = LOADS * 256;
    const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32;
    const int64_t from = int64_t(row < a.rows ? row : 0) * ((kColumns / 8)) + lane;
    const uint4* weights = static_cast<const uint4*>(a.weight) + from;
    uint4 values[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) values[i] = load_once(weights + i * 32);
    request_norm<TOKENS, kColumns>(a, token);
    wait_for_previous();
    prepare<TOKENS, kColumns, false>(a, token, sums);
    let_next_start();

    float total[TOKENS] = {};
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        float w[8];
        widen(values[i % AHEAD], w);
        if (i + AHEAD < LOADS) values[i % AHEAD] = load_once(weights + (i + AHEAD) * 32);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            float x[8];
            widen(token[t * ((kColumns / 8)) + i * 32 + lane], x);
#pragma unroll
            for (int j = 0; j < 8; ++j) total[t] += w[j] * x[j];
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const float sum = sum_lanes(total[t]);
        if (lane == 0 && row < a.rows && t < a.tokens) a.out[int64_t(t) * a.rows + row] = __float2bfloat16(sum);
    }
}

template <int TOKENS, int LOADS>
int start_bf16(const LinearArguments& a, void* stream) {
    constexpr int kAhead = LOADS < 7 ? LOADS : 7;
    return launch(linear_bf16<TOKENS, LOADS, kAhead>, dim3((a.rows + kWarps - 1) / kWarps), kThreads,
                  token_bytes<TOKENS, LOADS * 256>(), a, stream);
}

template <int TOKENS>
int by_columns_bf16(const LinearArguments& a, void* stream) {
    switch (a.columns) {
        case 256: return start_bf16<TOKENS, 1>(a, stream);
        case 512: return start_bf16<TOKENS, 2>(a, stream);
        case 1024: return start_bf16<TOKENS, 4>(a, stream);
        case 1536: return start_bf16<TOKENS, 6>(a, stream);
        case 2048: return start_bf16<TOKENS, 8>(a, stream);
        case 2304: return start_bf16<TOKENS, 9>(a, stream);
        case 4096: return start_bf16<TOKENS, 16>(a, stream);
        case 7168: return start_bf16<TOKENS, 28>(a, stream);
        default: return 1000;
    }
}

template <int TOKENS, int LOADS, int LANES, int ROWS>
int start(const LinearArguments& a, void* stream) {
    const int rows = kThreads / LANES * ROWS;
    return launch(linear<TOKENS, LOADS, LANES, ROWS>, dim3((a.rows + rows - 1) / rows), kThreads,
                  token_bytes<TOKENS, LOADS * LANES * 16>(), a, stream);
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
        weight,                               static_cast<const float*>(scale),
        static_cast<const __nv_bfloat16*>(norm), static_cast<__nv_bfloat16*>(out),
        static_cast<__nv_bfloat16*>(total),   tokens, rows, columns, eps};
    const bool bf16 = scale == nullptr;
    if (tokens == 1) return bf16 ? decode::by_columns_bf16<1>(a, stream) : decode::by_columns<1>(a, stream);
    if (tokens == 2) return bf16 ? decode::by_columns_bf16<2>(a, stream) : decode::by_columns<2>(a, stream);
    if (tokens <= 4) return bf16 ? decode::by_columns_bf16<4>(a, stream) : decode::by_columns<4>(a, stream);
    return 1000;
}
