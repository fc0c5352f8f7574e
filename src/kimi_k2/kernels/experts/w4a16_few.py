"""INT4 experts of a few tokens that have the bits of many: `torch.ops.kimi_k2.moe_w4a16_few`.

For batch-invariant mode: what `moe_w4a16` makes unfused and unpaired of tiles of up to 32 tokens, and with a shared
expert in bfloat16 what `dense_gemm`, PyTorch's silu and products and the sum of both make, in two launches.
csrc/w4a16_few.cu and w4a16_few_shared.cuh say how they work. Capture-safe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import structure
from kimi_k2.kernels.experts.launch import fill
from kimi_k2.kernels.experts.w4a16 import LIMITS, PACKED
from kimi_k2.kernels.experts.w4a16_layout import CHUNK_COLUMNS, GROUP
from kimi_k2.kernels.linear import dense_gemm

MAX_TOKENS, MAX_TOP_K, MAX_SPLITS = 4, 16, 8
MAX_BLOCKS = 64  # of 128 columns of the part of a token that a block of the first launch has
MAX_TILES = 40  # of 64 rows by 128 columns that fit a block of the second launch
# Such tiles that a warpgroup of the first launch keeps requested, of one token: all that a part of 7168 columns in two
# has; of more tokens so few that three blocks share an SM.
RING_ALONE, RING = 14, 7
# Units of 8 KB of the shared expert's first stage that a block keeps requested, by tokens: what fits the same room. Of
# more tokens it is as fast beside the others, on a stream of its own.
SHARED_RING = {1: 8, 2: 7}
SHARED_PARTS, MAX_SHARED, MAX_SHARED_TILES = 8, 256, 32


Arguments = structure("experts/csrc/w4a16_few.cu", "FewArguments")


def has_room(tokens: int, top_k: int, inter: int) -> bool:
    """Whether a shared expert joins so many tokens of routed ones."""
    return tokens in SHARED_RING and top_k * (inter // CHUNK_COLUMNS) <= MAX_SHARED_TILES


def supports_shared(gate_up: Tensor, down: Tensor) -> bool:
    """Whether a shared expert [2I, H], [H, I] joins: BF16, in the parts that `dense_gemm` takes of such weights."""
    (rows, hidden), inter = gate_up.shape, down.shape[1]
    parts = dense_gemm.decode_cluster(rows, hidden), dense_gemm.decode_cluster(hidden, inter)
    fits = parts == (SHARED_PARTS, 1) and hidden % (64 * SHARED_PARTS) == 0 and inter % 64 == 0 and inter <= MAX_SHARED
    return fits and rows == 2 * inter and gate_up.dtype == down.dtype == torch.bfloat16


def _check_shared(T: int, k: int, F: int, shared_gate_up: Tensor | None, shared_down: Tensor | None) -> None:
    if shared_gate_up is None or shared_down is None:
        return
    if not (supports_shared(shared_gate_up, shared_down) and has_room(T, k, F // 2)):
        raise KernelError(
            f"{T} tokens of {k} experts, intermediate {F // 2}, shared expert {list(shared_gate_up.shape)},"
            f" {list(shared_down.shape)}: expected at most {max(SHARED_RING)} tokens,"
            f" {MAX_SHARED_TILES * CHUNK_COLUMNS} values of a token's experts, I a multiple of 64 up to {MAX_SHARED},"
            f" in {SHARED_PARTS} parts and one"
        )


@kernel_operation(
    "moe_w4a16_few",
    f"{PACKED}, shared_gate_up bf16[2*J,H]?, shared_down bf16[H,J]? -> out bf16[T,H]; {LIMITS};"
    f" gate_up_proj_scale.dtype == bf16 and G * {GROUP} == H and down_proj_scale is not None;"
    f" T <= {MAX_TOKENS} and 2 <= k <= {MAX_TOP_K}; k * (F // {2 * CHUNK_COLUMNS}) <= {MAX_TILES};"
    f" 0 < splits <= {MAX_SPLITS} and H / {CHUNK_COLUMNS} / splits <= {MAX_BLOCKS};"
    " (shared_gate_up is None) == (shared_down is None)",
    also=_check_shared,
)
def moe_w4a16_few(
    x: Tensor,
    gate_up_proj_packed: Tensor,
    gate_up_proj_scale: Tensor,
    down_proj_packed: Tensor,
    down_proj_scale: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    splits: int,
    expert_map: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    *,
    out: Tensor,
) -> None:
    """`moe_w4a16`, unfused, unpaired, `max_tokens` 32 and `splits2` 1, plus the shared expert: the same bits.

    Args:
        x .. topk_weights, expert_map: as `moe_w4a16` takes them; T up to 4, 2 <= k <= 16, k * I up to 5120.
        splits: parts of the first stage's columns that are summed apart, `splits1` of `moe_w4a16`.
        shared_gate_up, shared_down: of a shared expert, as `supports_shared` and `has_room` say.
    """
    packed = gate_up_proj_packed, gate_up_proj_scale, down_proj_packed, down_proj_scale
    shape = *topk_indices.shape, len(down_proj_packed), x.shape[1], gate_up_proj_packed.shape[1] // 2
    tokens, top_k, _, _, inter = shape
    intermediate = torch.empty(tokens * top_k * inter, dtype=torch.bfloat16, device=x.device)
    shared_intermediate = None
    if shared_down is not None:
        shared_intermediate = torch.empty(tokens, shared_down.shape[1], dtype=torch.bfloat16, device=x.device)
    tensors = x, topk_indices, topk_weights, expert_map, *packed, intermediate, out
    shared = shared_gate_up, shared_down, shared_intermediate
    arguments = fill(Arguments, shape, topk_indices, expert_map, *tensors, *shared)
    arguments.splits, arguments.ring = splits, RING_ALONE if tokens == 1 and shared_down is None else RING
    if shared_down is not None:
        arguments.shared_inter, arguments.shared_ring = shared_down.shape[1], SHARED_RING[tokens]
    launch("experts/w4a16_few", "kimi_w4a16_few", "moe_w4a16_few", x.device, arguments)
