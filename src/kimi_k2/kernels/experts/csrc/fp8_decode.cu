// Blockwise FP8 experts for a few tokens, one token-expert pair at a time, in two launches: gate and up rows with
// SiLU * mul, then down rows summed over a token's experts. Activations keep bf16 (they are not quantized), the
// intermediate float32, and every sum has a fixed order. A shared expert of the same width may come along as one more
// pair of weight one; its weights, known in advance, are asked for before the routing is there.
#include "expert_arguments.cuh"

namespace decode {

constexpr int kDownRows = 4;   // rows of a warp in the second launch
constexpr int kDownBatch = 5;  // 16-byte loads a lane and row in flight there: nine experts of width 256 need 4.5

// One warp a row of the intermediate: its gate row and its up row. LOADS of 512 bytes a row, AHEAD of them in flight.
template <int LOADS, int AHEAD>
__global__ void __launch_bounds__(kThreads, 3) gate_up_rows(const ExpertArguments a) {
  DECODE_DYNAMIC_SHARED(uint4, token_values);
  constexpr int kColumns = LOADS * 512, kBlocks = kColumns / 128;
  const int lane = threadIdx.x % 32, slot = blockIdx.y, token = blockIdx.z;
  const int row = blockIdx.x * kWarps + threadIdx.x / 32;
  const bool shared = a.shared_gate_up != nullptr && slot == 0;
  const uint8_t* weights = a.shared_gate_up;
  const float* scales = a.shared_gate_up_scale;
  if (!shared) {
    pdl_wait();
    pdl_launch();
    float weight;
    const int expert = routed_expert(a, token * a.top_k + slot - (a.shared_gate_up != nullptr), weight);
    if (expert < 0) return;
    weights = a.gate_up + int64_t(expert) * 2 * a.inter * kColumns;
    scales = a.gate_up_scale + int64_t(expert) * (2 * a.inter / 128) * kBlocks;
  }
  const uint8_t* gate_row = weights + int64_t(row) * kColumns + lane * 16;
  const uint8_t* up_row = gate_row + int64_t(a.inter) * kColumns;
  uint4 gate[AHEAD], up[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) gate[i] = load_once(gate_row + i * 512), up[i] = load_once(up_row + i * 512);
  scales += row / 128 * kBlocks;
  const float* up_scales = scales + a.inter / 128 * kBlocks;
  const bool more = lane + 32 < kBlocks;
  const float gate_scale[2] = {lane < kBlocks ? __ldg(scales + lane) : 0.f, more ? __ldg(scales + lane + 32) : 0.f};
  const float up_scale[2] = {lane < kBlocks ? __ldg(up_scales + lane) : 0.f, more ? __ldg(up_scales + lane + 32) : 0.f};
  if (shared) {
    pdl_wait();
    pdl_launch();
  }
  const uint4* x = reinterpret_cast<const uint4*>(a.x) + int64_t(token) * (kColumns / 8);
  take_groups<(kColumns / 8 + kThreads - 1) / kThreads>(
      x, kColumns / 8, [&](int v, const uint4 value) { token_values[place_of(v, kColumns)] = value; });
  __syncthreads();

  float gate_sum = 0, up_sum = 0;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    float values[16];
    take16(token_values, kColumns, i * 32 + lane, values);
    const int block = (i * 4 + lane / 8) % 32;
    gate_sum += dot16(gate[i % AHEAD], values) * __shfl_sync(kAll, gate_scale[i / 8], block);
    up_sum += dot16(up[i % AHEAD], values) * __shfl_sync(kAll, up_scale[i / 8], block);
    if (i + AHEAD < LOADS) {
      gate[i % AHEAD] = load_once(gate_row + (i + AHEAD) * 512);
      up[i % AHEAD] = load_once(up_row + (i + AHEAD) * 512);
    }
  }
  gate_sum = sum_lanes(gate_sum), up_sum = sum_lanes(up_sum);
  if (lane == 0)
    a.intermediate[(int64_t(token) * slots_of(a) + slot) * a.inter + row] =
        gate_sum / (1.f + __expf(-gate_sum)) * up_sum;
}

// One warp kDownRows rows of the output over all experts of a token: no sum ever leaves the warp.
__global__ void __launch_bounds__(kThreads, 2) down_rows(const ExpertArguments a) {
  DECODE_DYNAMIC_SHARED(uint4, values);  // the token's intermediate, quarter by quarter of each 16 values
  __shared__ Pairs pairs[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.y, slots = slots_of(a);
  const int row = (blockIdx.x * kWarps + warp) * kDownRows, per_slot = a.inter / 16, held = slots * per_slot;
  pdl_launch();

  const int chunks = list_pairs(a, token, a.shared_gate_up != nullptr, pairs[warp]) * per_slot;
  float total[kDownRows] = {};
  bool waited = false;
  for (int base = 0; base < chunks || !waited; base += 32 * kDownBatch) {
    uint4 fp8[kDownBatch][kDownRows];
    float factor[kDownBatch];
    int place[kDownBatch];
#pragma unroll
    for (int b = 0; b < kDownBatch; ++b) {
      const int chunk = base + b * 32 + lane, which = chunk / per_slot, within = chunk % per_slot;
      place[b] = -1;
      if (chunk >= chunks) continue;
      const int entry = pairs[warp].entry[which];
      const bool routed = (entry & 0xffff) != kShared;
      const int64_t of = routed ? entry & 0xffff : 0;
      const uint8_t* at = (routed ? a.down : a.shared_down) + (of * a.hidden + row) * a.inter + within * 16;
      const float* scale = (routed ? a.down_scale : a.shared_down_scale) +
                           (of * (a.hidden / 128) + row / 128) * (a.inter / 128) + within / 8;
      place[b] = (entry >> 16) * per_slot + within;
#pragma unroll
      for (int r = 0; r < kDownRows; ++r) fp8[b][r] = load_once(at + int64_t(r) * a.inter);
      factor[b] = __ldg(scale) * pairs[warp].weight[which];
    }
    if (!waited) {
      pdl_wait();
      take_groups<2>(reinterpret_cast<const uint4*>(a.intermediate) + int64_t(token) * held * 4, held * 4,
                     [&](int v, const uint4 value) { values[(v & 3) * held + (v >> 2)] = value; });
      __syncthreads();
      waited = true;
    }
#pragma unroll
    for (int b = 0; b < kDownBatch; ++b) {
      if (place[b] < 0) continue;
      float x[16];
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const uint4 four = values[quarter * held + place[b]];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[4 * quarter + i] = __uint_as_float((&four.x)[i]);
      }
#pragma unroll
      for (int r = 0; r < kDownRows; ++r) total[r] += dot16(fp8[b][r], x) * factor[b];
    }
  }
#pragma unroll
  for (int r = 0; r < kDownRows; ++r) total[r] = sum_lanes(total[r]);
  if (lane == 0) {
    __nv_bfloat162* out = reinterpret_cast<__nv_bfloat162*>(a.out + int64_t(token) * a.hidden + row);
    out[0] = __floats2bfloat162_rn(total[0], total[1]);
    out[1] = __floats2bfloat162_rn(total[2], total[3]);
  }
}

template <int LOADS, int AHEAD>
int start(const ExpertArguments& a, void* stream) {
  const int slots = a.top_k + (a.shared_gate_up != nullptr);
  const int status = launch(gate_up_rows<LOADS, AHEAD>, dim3(a.inter / kWarps, slots, a.tokens), kThreads,
                            size_t(a.hidden) * 2, a, stream);
  if (status) return status;
  return launch(down_rows, dim3(a.hidden / (kWarps * kDownRows), a.tokens), kThreads,
                size_t(slots) * a.inter * sizeof(float), a, stream);
}

}  // namespace decode

extern "C" int kimi_experts_decode(const decode::ExpertArguments* a, void* stream) {
  if (a->top_k + (a->shared_gate_up != nullptr) > decode::kMaxSlots) return host::kNoInstance;
  switch (a->hidden) {
    case 1024: return decode::start<2, 2>(*a, stream);
    case 7168: return decode::start<14, 5>(*a, stream);
    default: return host::kNoInstance;
  }
}
