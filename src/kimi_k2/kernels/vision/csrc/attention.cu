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

extern "C" int kimi_vision_attention(const void* packed, const void* parts, const void* starts, const void* joined,
                                     void* sums, void* out, int blocks, int joins, int heads, int capacity,
                                     float softmax_scale, void* stream) {
  static_assert(sizeof(vision::Memory) <= host::kMaxShared, "more than a block has");
  const vision::Arguments a{static_cast<const __nv_bfloat16*>(packed),
                            static_cast<const vision::Part*>(parts),
                            static_cast<const int*>(starts),
                            static_cast<__nv_bfloat16*>(out),
                            static_cast<vision::Sums*>(sums),
                            heads,
                            capacity,
                            softmax_scale * 1.4426950408889634f};
  const auto queue = static_cast<cudaStream_t>(stream);
  const int rc =
      host::launch(vision::attention, {dim3(blocks), vision::kThreads, sizeof(vision::Memory), queue, false}, a);
  if (rc || !joins) return rc;
  const vision::JoinArguments j{static_cast<const vision::Joined*>(joined), a.sums, a.out, heads};
  return host::launch(vision::join,
                      {dim3(joins, vision::kQueries / vision::kJoinRows), vision::kJoinThreads, 0, queue, false}, j);
}
