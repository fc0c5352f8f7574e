// NVFP4 experts.
#include "w4a16_launch.cuh"

// Returns 0, a cudaError_t, or a host::Error.
extern "C" int kimi_w4a16(const w4a16::Args* args, void* stream_ptr) {
  return w4a16::launch_all<w4a16::Nvfp4, false>(*args, static_cast<cudaStream_t>(stream_ptr));
}
