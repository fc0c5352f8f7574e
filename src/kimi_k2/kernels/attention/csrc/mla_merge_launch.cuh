// Host side of the merge of a plan's parts.
#pragma once
#include "common/csrc/launch.cuh"
#include "mla_merge_planned.cuh"

namespace mla {

template <PartsAs AS, class How>
int launch_merge_planned(const Arguments& a, cudaStream_t stream) {
  const int most = a.batch * a.heads * (kLatent / Source<AS>::kValues) / kJoinThreads * merge_groups(0);
  const int blocks = min(most, How::kBlocks * a.sm_count);
  return host::launch(merge_planned<AS, How>, {dim3(blocks), kJoinThreads, 0, stream}, a);
}

template <PartsAs AS>
int launch_merge_planned(const Arguments& a, cudaStream_t stream) {
  constexpr int kFew = 32;
  return a.batch < kFew && !a.uniform ? launch_merge_planned<AS, FewMerges>(a, stream)
                                      : launch_merge_planned<AS, ManyMerges>(a, stream);
}

}  // namespace mla
