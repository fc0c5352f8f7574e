// y = RMSNorm(x) W^T for one to four tokens: W is read once, each row by LANES lanes of one warp, 16 bytes a lane and load.
// W is e4m3 with one float32 scale a 128x128 block. All of a lane's loads are issued before the first is used; the
// tokens' statistics are computed meanwhile, so that they hide behind the weights' latency.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

struct Arguments {
    const __nv_bfloat16* x;
    const uint8_t* weight;
    const float* scale;
    const __nv_bfloat16* norm;
    __nv_bfloat16* out;
    int tokens, rows, columns;
    float eps;
};

__device__ __forceinline__ uint4 load_once(const void* address) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

__device__ __forceinline__ float2 two_codes(uint32_t pair) {
    __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    return __half22float2(*reinterpret_cast<__half2*>(&half));
}

// LOADS 16-byte loads a lane; LANES lanes a row: columns = 16 * LANES * LOADS.
template <int TOKENS, int LOADS, int LANES>
__global__ void __launch_bounds__(kThreads) product(const Arguments a) {
    extern __shared__ __nv_bfloat16 normed[];
    __shared__ float sums[TOKENS][kThreads / 32];
    const int thread = threadIdx.x, lane = thread % LANES;
    const int row = blockIdx.x * (kThreads / LANES) + thread / LANES;
    const bool here = row < a.rows;
    uint4 codes[LOADS];
    const uint8_t* weights = a.weight + int64_t(row) * a.columns + lane * 16;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        codes[i] = here ? load_once(weights + i * LANES * 16) : make_uint4(0, 0, 0, 0);
    // Weights do not depend on the launch before; the tokens do.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");

    const int pairs = a.columns / 2;
    const __nv_bfloat162* source = reinterpret_cast<const __nv_bfloat162*>(a.x);
    __nv_bfloat162* target = reinterpret_cast<__nv_bfloat162*>(normed);
    if (a.norm != nullptr) {
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            float sum = 0;
            for (int i = thread; i < pairs && t < a.tokens; i += kThreads) {
                const float2 v = __bfloat1622float2(source[t * pairs + i]);
                sum += v.x * v.x + v.y * v.y;
            }
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
            if (thread % 32 == 0) sums[t][thread / 32] = sum;
        }
        __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float inverse = 1;
        if (a.norm != nullptr) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < kThreads / 32; ++w) sum += sums[t][w];
            inverse = rsqrtf(sum / a.columns + a.eps);
        }
        for (int i = thread; i < pairs; i += kThreads) {
            __nv_bfloat162 v = t < a.tokens ? source[t * pairs + i] : __floats2bfloat162_rn(0, 0);
            if (a.norm != nullptr) {
                const float2 f = __bfloat1622float2(v);
                v = __hmul2(__floats2bfloat162_rn(f.x * inverse, f.y * inverse),
                            reinterpret_cast<const __nv_bfloat162*>(a.norm)[i]);
            }
            target[t * pairs + i] = v;
        }
    }
    __syncthreads();

    float total[TOKENS] = {};
    const float* scales = a.scale + (here ? row / 128 : 0) * (a.columns / 128);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int column = (i * LANES + lane) * 16;
        const float scale = scales[column / 128];
        const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
        float part[TOKENS] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 values[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t)
                values[t] = *reinterpret_cast<const uint4*>(normed + t * a.columns + column + half * 8);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 w = two_codes((words[half * 2 + j / 2] >> (j % 2 * 16)) & 0xffff);
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) {
                    const uint32_t raw = (&values[t].x)[j];
                    part[t] += w.x * __uint_as_float(raw << 16) + w.y * __uint_as_float(raw & 0xffff0000u);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) total[t] += part[t] * scale;
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) total[t] += __shfl_xor_sync(~0u, total[t], mask);
        if (lane == 0 && here && t < a.tokens) a.out[int64_t(t) * a.rows + row] = __float2bfloat16(total[t]);
    }
}

template <int TOKENS, int LOADS, int LANES>
int launch(const Arguments& a, cudaStream_t stream) {
    const int rows = kThreads / LANES;
    const size_t shared = size_t(TOKENS) * a.columns * 2;
    auto kernel = product<TOKENS, LOADS, LANES>;
    if (shared > 48 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((a.rows + rows - 1) / rows);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    cudaLaunchAttribute overlap;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, a);
}

template <int TOKENS>
int by_columns(const Arguments& a, cudaStream_t stream) {
    switch (a.columns) {
        case 256: return launch<TOKENS, 1, 16>(a, stream);
        case 512: return launch<TOKENS, 1, 32>(a, stream);
        case 1024: return launch<TOKENS, 2, 32>(a, stream);
        case 1536: return launch<TOKENS, 3, 32>(a, stream);
        case 2048: return launch<TOKENS, 4, 32>(a, stream);
        case 2304: return launch<TOKENS, 9, 16>(a, stream);
        case 4096: return launch<TOKENS, 8, 32>(a, stream);
        case 7168: return launch<TOKENS, 14, 32>(a, stream);
        default: return 1000;
    }
}

}  // namespace

extern "C" int kimi_linear_decode(const void* x, const void* weight, const void* scale, const void* norm, void* out,
                                  int tokens, int rows, int columns, float eps, void* stream) {
    const Arguments a{static_cast<const __nv_bfloat16*>(x), static_cast<const uint8_t*>(weight),
                      static_cast<const float*>(scale),     static_cast<const __nv_bfloat16*>(norm),
                      static_cast<__nv_bfloat16*>(out),     tokens, rows, columns, eps};
    auto queue = static_cast<cudaStream_t>(stream);
    if (tokens == 1) return by_columns<1>(a, queue);
    if (tokens == 2) return by_columns<2>(a, queue);
    if (tokens <= 4) return by_columns<4>(a, queue);
    return 1000;
}
