"""BF16 routed experts in Triton: `torch.ops.kimi_k2.moe_bf16`.

For checkpoints and layers whose experts are not quantized. Pairs are sorted by expert on the device, two grouped GEMMs
follow, and a token's pairs are summed in order; nothing is read back, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import capability, has_triton
from kimi_k2.kernels.common.launch import expect
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.experts.launch import expect_routing, token_ranges

# Up to so many pairs, and so many of an expert, one launch sorts them, each expert's program looking at all. There are
# then as many numbers of blocks as pairs, and the unused ones cost little only while they are few.
MAX_FEW, MAX_FEW_EACH = 1024, 2


class Launch(NamedTuple):
    """How the two GEMMs are cut.

    Attributes:
        rows: pairs of an expert that share a pass over its weights.
        width: columns of a program of the first GEMM, which has two sums; twice as many of the second.
        warps, stages: of a program.
        step: inputs of a stage.
    """

    rows: int
    width: int
    warps: int
    stages: int
    step: int = 64


# Pairs of an expert up to which a launch is chosen, measured on an H200, TP8 and EP8 slices, 1 to 4096 tokens.
LAUNCHES = (
    (0.1, Launch(16, 32, 4, 3, 256)),
    (1.0, Launch(16, 64, 4, 3, 128)),
    (2.0, Launch(32, 64, 4, 4, 64)),
    (16.0, Launch(32, 64, 4, 3, 128)),
    (64.0, Launch(64, 64, 4, 3, 64)),
    (math.inf, Launch(128, 64, 8, 3, 64)),
)


def choose_launch(pairs: int, experts: int) -> Launch:
    """By the pairs that an expert gets of an even routing."""
    return next(launch for most, launch in LAUNCHES if pairs / experts <= most)


def divisor(inputs: int, step: int) -> int:
    """The largest power of two up to `step` that divides `inputs`, a multiple of 128."""
    return math.gcd(inputs, step)


def supports(hidden: int, inter: int, device: torch.device) -> bool:
    """A GPU of compute capability 8.0 or later with Triton, and sizes that are multiples of 128."""
    fits = hidden % 128 == 0 and inter % 128 == 0 and inter > 0
    return fits and device.type == "cuda" and has_triton() and capability(device.index) >= (8, 0)


class Order(NamedTuple):
    """Pairs sorted by expert, cut into blocks of one expert each.

    Attributes:
        local: int32 [T * k], the pairs' experts; E where it is not held.
        pairs: int64 [T * k], those of expert 0 first, those without a held expert last.
        block_expert: int32 [most blocks], E where there is none.
        starts, counts, block_ends: int32 [E]: first place and number of an expert's pairs, its last block's number + 1.
    """

    local: Tensor
    pairs: Tensor
    block_expert: Tensor
    starts: Tensor
    counts: Tensor
    block_ends: Tensor


def sort_pairs(topk_indices: Tensor, expert_map: Tensor | None, experts: int, rows: int) -> Order:
    """Sort by expert without reading anything back; a chosen index outside the model's experts counts as not held."""
    chosen, device = topk_indices.flatten().long(), topk_indices.device
    known = experts if expert_map is None else expert_map.shape[0]
    valid = (chosen >= 0) & (chosen < known)
    local = chosen.clamp(0, known - 1)
    local = local if expert_map is None else expert_map[local].long()
    local = torch.where(valid & (local >= 0) & (local < experts), local, experts)
    every = torch.zeros(experts + 1, dtype=torch.int32, device=device)
    every.scatter_add_(0, local, torch.ones_like(local, dtype=torch.int32))
    counts = every[:experts]
    starts = counts.cumsum(0, dtype=torch.int32) - counts
    block_ends = ((counts + (rows - 1)) // rows).cumsum(0, dtype=torch.int32)
    most = min(len(chosen), len(chosen) // rows + experts)
    numbers = torch.arange(most, dtype=torch.int32, device=device)
    block_expert = torch.searchsorted(block_ends, numbers, right=True, out_int32=True)
    return Order(local.int(), local.argsort(stable=True), block_expert, starts, counts, block_ends)


def sort_few(topk_indices: Tensor, expert_map: Tensor | None, experts: int, rows: int) -> Order:
    """`sort_pairs` by one launch, for at most MAX_FEW pairs; blocks are numbered with gaps."""
    pairs, device = topk_indices.numel(), topk_indices.device
    known = experts if expert_map is None else expert_map.shape[0]
    local, block_expert = (torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(2))
    order = torch.empty(pairs, dtype=torch.int64, device=device)
    starts, counts, block_ends = torch.empty(3, experts, dtype=torch.int32, device=device)
    padded = max(16, 1 << (pairs - 1).bit_length())
    _kernels().sort_few[(experts + 1,)](
        topk_indices.contiguous(), topk_indices if expert_map is None else expert_map, local, order, block_expert,
        starts, counts, block_ends, pairs, known, experts, MAPPED=expert_map is not None, PAIRS=padded, ROWS=rows,
        num_warps=4 if padded > 256 else 1,
    )  # fmt: skip
    return Order(local, order, block_expert, starts, counts, block_ends)


@functools.cache
def _kernels() -> Any:
    from kimi_k2.kernels.experts import bf16_triton

    return bf16_triton


def _check(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, topk_indices: Tensor, topk_weights: Tensor,
    expert_map: Tensor | None,
) -> tuple[int, int, int]:  # fmt: skip
    """(experts, hidden, intermediate), or KernelError naming the argument and what was expected."""
    if x.dim() != 2 or topk_indices.dim() != 2 or down_proj.dim() != 3:
        raise KernelError("x and topk_indices must have 2 dimensions and down_proj 3")
    experts, hidden, inter = down_proj.shape
    if hidden % 128 or inter % 128:
        raise KernelError(f"hidden {hidden} and intermediate {inter} must be multiples of 128")
    expect("x", x, x.device, (x.shape[0], hidden), torch.bfloat16)
    expect("gate_up_proj", gate_up_proj, x.device, (experts, 2 * inter, hidden), torch.bfloat16)
    expect("down_proj", down_proj, x.device, (experts, hidden, inter), torch.bfloat16)
    expect_routing(x, topk_indices, topk_weights, expert_map)
    return experts, hidden, inter


@kernel_operation("moe_bf16")
def moe_bf16(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None = None,
    how: list[int] | None = None,
) -> Tensor:
    """Sum over each token's chosen experts of weight * down(silu(gate(x)) * up(x)).

    Sums are float32; the intermediate and the pairs' outputs are rounded to bfloat16.

    Args:
        x: bfloat16 [T, H], H a multiple of 128.
        gate_up_proj: bfloat16 [E, 2I, H], gate rows first; I a multiple of 128.
        down_proj: bfloat16 [E, H, I].
        topk_indices: int64 or int32 [T, k], global expert indices; a negative index contributes nothing.
        topk_weights: float32 [T, k].
        expert_map: int32 [experts of the model] to the local expert or -1 (expert parallelism); None: all are local.
        how: the fields of `Launch` in order, to pin it; None chooses by the number of pairs.

    Returns:
        bfloat16 [T, H]; zeros for a token without a local pair.

    Raises:
        KernelError: a shape, dtype or device that the kernel does not take.
    """
    experts, hidden, inter = _check(x, gate_up_proj, down_proj, topk_indices, topk_weights, expert_map)
    top_k, out = topk_indices.shape[1], torch.empty_like(x)
    for begin, end in token_ranges(x.shape[0], lambda count: 2 * count * top_k * (hidden + inter)):
        part = x[begin:end], topk_indices[begin:end], topk_weights[begin:end], out[begin:end]
        run(
            *part,
            gate_up_proj,
            down_proj,
            expert_map,
            Launch(*how) if how else choose_launch((end - begin) * top_k, experts),
        )
    return out


moe_bf16.fake(_check, lambda x: torch.empty_like(x))


def run(
    x: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    out: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    expert_map: Tensor | None,
    how: Launch,
) -> None:
    """`moe_bf16` into `out` with the launch pinned, arguments unchecked."""
    (tokens, top_k), (experts, hidden, inter) = topk_indices.shape, down_proj.shape
    if not tokens:
        return
    few = tokens * top_k <= min(MAX_FEW, MAX_FEW_EACH * experts)
    sort = sort_few if few else sort_pairs
    order, kernels = sort(topk_indices, expert_map, experts, how.rows), _kernels()
    sorted_by = order.pairs, order.block_expert, order.starts, order.counts, order.block_ends
    middle, parts = (x.new_empty(tokens * top_k, size) for size in (inter, hidden))
    sizes = {"HIDDEN": hidden, "INTER": inter, "ROWS": how.rows, "WIDTH": how.width}
    options = {"num_warps": how.warps, "num_stages": how.stages}
    blocks = len(order.block_expert)
    kernels.gate_up[(inter // how.width, blocks)](
        x, gate_up_proj, *sorted_by, middle, top_k, experts, **sizes, STEP=divisor(hidden, how.step), **options
    )
    sizes["WIDTH"] = divisor(hidden, 2 * how.width)  # one sum instead of two
    kernels.down[(hidden // sizes["WIDTH"], blocks)](
        middle, down_proj, *sorted_by, topk_weights, parts, experts, **sizes, STEP=divisor(inter, how.step), **options
    )
    kernels.combine[(tokens, -(-hidden // 1024))](parts, order.local, out, top_k, experts, HIDDEN=hidden, WIDTH=1024)
