// Host side of attention.cuh.
#include "attention.cuh"
#include "common/csrc/launch.cuh"

extern "C" int kimi_vision_pack(const void* qkv, const void* cos, const void* sin, void* packed, int tokens, int heads,
                                int capacity, int stride, void* stream) {
  const vision::PackArguments a{static_cast<const __nv_bfloat16*>(qkv),
                                static_cast<const float*>(cos),
                                static_cast<const float*>(sin),
                                static_cast<__nv_bfloat16*>(packed),
                                tokens,
                                heads,
                                capacity,
                                stride};
  return host::launch(vision::rotate_and_pack,
                      {dim3((capacity + 7) / 8), 256, 0, static_cast<cudaStream_t>(stream), false}, a);
}

extern "C" int kimi_vision_attention(const void* packed, const void* tiles, void* out, int count, int heads,
                                     int capacity, int sms, float softmax_scale, void* stream) {
  static_assert(sizeof(vision::Memory) <= host::kMaxShared, "more than a block has");
  const vision::Arguments a{static_cast<const __nv_bfloat16*>(packed),
                            static_cast<const vision::Tile*>(tiles),
                            static_cast<__nv_bfloat16*>(out),
                            count,
                            heads,
                            capacity,
                            softmax_scale * 1.4426950408889634f};
  return host::launch(vision::attention,
                      {dim3(min(count * heads, sms)), vision::kThreads, sizeof(vision::Memory),
                       static_cast<cudaStream_t>(stream), false},
                      a);
}
