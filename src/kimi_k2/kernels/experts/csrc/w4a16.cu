// INT4 experts, whose second stage may be bf16.
#include "w4a16_launch.cuh"

// Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_w4a16(const w4a16::Args* args, void* stream_ptr) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_ptr);
  return args->w2_bf16 ? w4a16::launch_all<w4a16::Int4, true>(*args, stream)
                       : w4a16::launch_all<w4a16::Int4, false>(*args, stream);
}
