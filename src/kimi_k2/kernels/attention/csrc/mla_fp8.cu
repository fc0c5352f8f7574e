// Host side of MLA decode attention over an e4m3 cache with queries in e4m3, in one term or two.
#include "mla_fp8_eight.cuh"
#include "mla_merge_launch.cuh"

namespace mla {

// Boxes of 64 rows of `columns` e4m3 values, swizzled over as many bytes.
static int encode(CUtensorMap* map, const Arguments& a, int columns) {
  const auto encode_tiled = host::tensor_map_encoder();
  if (!encode_tiled) return host::kNoEncoder;
  const cuuint64_t sizes[2] = {kRow, cuuint64_t(a.rows)}, strides[1] = {kRow};
  const cuuint32_t box[2] = {cuuint32_t(columns), kRows}, step[2] = {1, 1};
  return encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(a.cache), sizes, strides, box, step,
                      CU_TENSOR_MAP_INTERLEAVE_NONE,
                      columns == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
             ? host::kNotEncoded
             : 0;
}

template <class Held, class Kernel>
static int launch_fp8(Kernel kernel, const __nv_bfloat16* q, const Arguments& a, cudaStream_t stream) {
  static_assert(sizeof(Held) <= host::kMaxShared, "a block does not have so much shared memory");
  CUtensorMap latent, rope;
  if (int rc = encode(&latent, a, 128)) return rc;
  if (int rc = encode(&rope, a, 64)) return rc;
  return host::launch(kernel, {dim3(a.blocks), kFp8Threads, sizeof(Held), stream}, latent, rope, q, a);
}

template <int TERMS>
static int launch_fp8(const __nv_bfloat16* q, const Arguments& a, cudaStream_t stream) {
  switch (a.heads) {
    case 8: return launch_fp8<EightMemory<TERMS>>(attend_fp8_eight<TERMS>, q, a, stream);
    case 16: return launch_fp8<Fp8Memory<16, TERMS>>(attend_fp8<16, TERMS>, q, a, stream);
    case 32: return launch_fp8<Fp8Memory<32, TERMS>>(attend_fp8<32, TERMS>, q, a, stream);
    case 64: return launch_fp8<Fp8Memory<64, TERMS>>(attend_fp8<64, TERMS>, q, a, stream);
    default: return host::kNoInstance;
  }
}

}  // namespace mla

// `q` is bfloat16, args->cache e4m3; args->plan says who takes which rows; in one term or two. Returns 0, a
// cudaError_t, or a host::Error.
extern "C" int kimi_mla_fp8(const void* q, const mla::Arguments* args, int terms, void* stream_ptr) {
  using namespace mla;
  const auto stream = static_cast<cudaStream_t>(stream_ptr);
  if (!args->plan) return host::kNoInstance;
  const auto rows = static_cast<const __nv_bfloat16*>(q);
  if (int rc = terms > 1 ? launch_fp8<2>(rows, *args, stream) : launch_fp8<1>(rows, *args, stream)) return rc;
  return args->whole ? 0 : launch_merge_planned<kFloat16>(*args, stream);
}
