// One new token for each sequence of a batch in pages: its length, position and slot, in one launch.
#include "norm.cuh"

namespace decode {

struct StepArguments {
  int *seq_lens, *input_ids;
  int64_t *positions, *slots;
  const int* block_table;
  int batch, wide, page;  // `wide` pages a row of the table
};

__global__ void __launch_bounds__(kThreads) next_step(const StepArguments a) {
  pdl_launch();
  const int at = blockIdx.x * kThreads + threadIdx.x;
  pdl_wait();
  if (at >= a.batch) return;
  const int position = a.seq_lens[at];
  a.positions[at] = position;
  if (position == 0) {  // padding
    a.input_ids[at] = 0;
    a.slots[at] = -1;
    return;
  }
  a.slots[at] = int64_t(a.block_table[int64_t(at) * a.wide + position / a.page]) * a.page + position % a.page;
  a.seq_lens[at] = position + 1;
}

}  // namespace decode

extern "C" int kimi_next_step(void* seq_lens, void* input_ids, void* positions, void* slots, const void* block_table,
                              int batch, int wide, int page, void* stream) {
  const decode::StepArguments given{static_cast<int*>(seq_lens),
                                    static_cast<int*>(input_ids),
                                    static_cast<int64_t*>(positions),
                                    static_cast<int64_t*>(slots),
                                    static_cast<const int*>(block_table),
                                    batch,
                                    wide,
                                    page};
  return decode::launch(decode::next_step, dim3((batch + decode::kThreads - 1) / decode::kThreads), decode::kThreads, 0,
                        given, stream);
}
