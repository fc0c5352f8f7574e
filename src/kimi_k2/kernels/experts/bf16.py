"""BF16 routed experts in Triton: `torch.ops.kimi_k2.moe_bf16`.

For checkpoints and layers whose experts are not quantized. Pairs are sorted by expert on the device, two grouped GEMMs
follow, and a token's pairs are summed in order; nothing is read back, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import capability, has_triton
from kimi_k2.kernels.common.launch import triton_kernels
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.experts.launch import MAPPED, ROUTING, token_ranges
from kimi_k2.ops.streams import beside

# Up to so many pairs one launch sorts them, each expert's program looking at all.
MAX_FEW = 2048
CHUNK = 1024  # pairs of a program otherwise


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


# Pairs of an expert up to which a launch is chosen: H200, slices of TP4, TP8, EP4 and EP8, 1 to 16384 tokens. Of few
# pairs where all tokens go to the same experts, narrow programs are more than SMs: EP4, 16 tokens, 60 us against 75.
LAUNCHES = (
    (0.7, Launch(16, 32, 4, 3, 256)),
    (2.0, Launch(16, 64, 4, 3, 128)),
    (16.0, Launch(32, 64, 4, 3, 128)),
    (64.0, Launch(64, 64, 4, 3, 64)),
    (math.inf, Launch(128, 128, 8, 4, 64)),
)
# For experts with more pairs than two blocks of such a launch, by the tokens of the call, which is what they have at
# most: where all tokens go to the same few experts they are all there is.
CROWDED_LAUNCHES = (
    (96, Launch(64, 32, 4, 3, 128)),
    (256, Launch(64, 64, 4, 4, 64)),
    (512, Launch(128, 64, 8, 4, 64)),
    (math.inf, Launch(128, 128, 8, 4, 64)),
)


# Up to so many tokens, experts with so many pairs have a pass of their own, of tiles like the others': of a single
# pass's numbers of blocks nearly all belong to nobody, and delay the rest (TP4, 16 tokens, all the same: 61 us to 75).
MOST_FEW_TOKENS, LEAST_OF_FEW = 32, 9


class Pass(NamedTuple):
    """The two GEMMs over the experts that have at least `least` pairs, and less than the next pass's least."""

    launch: Launch
    least: int = 1

    def blocks(self, pairs: int, experts: int) -> int:
        """Numbers of blocks, used or not: `first_block` of bf16_triton.py at the end of all pairs."""
        return pairs // self.launch.rows + min(pairs // self.least, experts + 1)


def choose_launch(pairs: float, experts: int) -> Launch:
    """By the pairs that an expert gets of an even routing."""
    return next(launch for most, launch in LAUNCHES if pairs / experts <= most)


def choose_passes(tokens: int, top_k: float, experts: int) -> list[Pass]:
    """One for all experts, or one for most of them and one for those with far more pairs than an even routing gives.

    Args:
        top_k: of a token's experts, those that are held of an even routing.
    """
    launch = choose_launch(tokens * top_k, experts)
    if launch.rows == LAUNCHES[0][1].rows and LEAST_OF_FEW <= tokens <= MOST_FEW_TOKENS:
        return [Pass(launch), Pass(LAUNCHES[0][1], LEAST_OF_FEW)]
    crowded = next(one for most, one in CROWDED_LAUNCHES if tokens <= most)
    least = 2 * launch.rows + 1
    if tokens < least or crowded.rows <= launch.rows:
        return [Pass(launch)]
    return [Pass(launch), Pass(crowded, least)]


@functools.cache
def _shared_bytes(index: int) -> int:
    """Shared memory that a block of GPU `index` may have."""
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def fit(launch: Launch, device: torch.device) -> Launch:
    """The launch with as many of its stages as a block's shared memory holds."""
    if device.type != "cuda":
        return launch
    stage = (launch.rows + 2 * launch.width) * launch.step * 2
    return launch._replace(stages=max(1, min(launch.stages, _shared_bytes(device.index) // stage)))


def divisor(inputs: int, step: int) -> int:
    """The largest power of two up to `step` that divides `inputs`, a multiple of 128."""
    return math.gcd(inputs, step)


def supports(hidden: int, inter: int, device: torch.device) -> bool:
    """A GPU of compute capability 8.0 or later with Triton, and sizes that are multiples of 128."""
    fits = hidden % 128 == 0 and inter % 128 == 0 and inter > 0
    return fits and device.type == "cuda" and has_triton() and capability(device.index) >= (8, 0)


class Order(NamedTuple):
    """Pairs sorted by expert, and which expert's each block of the GEMMs is.

    Attributes:
        local: int32 [T * k], the pairs' experts; E where it is not held.
        pairs: int64 [T * k], those of expert 0 first; undefined past the held ones.
        starts, counts: int32 [E], first place and number of an expert's pairs.
        blocks: of each `Pass`, int32: expert of each block, E where there is none.
    """

    local: Tensor
    pairs: Tensor
    starts: Tensor
    counts: Tensor
    blocks: list[Tensor]


def sort_pairs(topk_indices: Tensor, expert_map: Tensor | None, experts: int, passes: Sequence[Pass]) -> Order:
    """Sort by expert without reading anything back; a chosen index outside the model's experts counts as not held.

    Few pairs by one launch, each expert's program looking at all of them.
    """
    chosen, pairs, device = topk_indices.contiguous(), topk_indices.numel(), topk_indices.device
    known, mapped = experts if expert_map is None else expert_map.shape[0], expert_map is not None
    local, order = (torch.empty(pairs, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    blocks = [torch.empty(one.blocks(pairs, experts), dtype=torch.int32, device=device) for one in passes]
    # Without a second pass the first one takes all.
    many, most = (passes[1].launch.rows, passes[1].least - 1) if len(passes) > 1 else (0, 2**30)
    sizes = {"ROWS": passes[0].launch.rows, "MANY_ROWS": many}
    lookup = chosen if expert_map is None else expert_map
    starts, cursors = torch.empty(2, experts, dtype=torch.int32, device=device)
    if pairs <= MAX_FEW:
        counts = cursors
        padded = max(16, 1 << (pairs - 1).bit_length())
        triton_kernels("experts/bf16").sort_few[(experts + 1,)](
            chosen, lookup, local, order, starts, counts, blocks[0], blocks[-1], most, pairs, known, experts,
            MAPPED=mapped, PAIRS=padded, **sizes, num_warps=4 if padded > 256 else 1,
        )  # fmt: skip
        return Order(local, order, starts, counts, blocks)
    counts = torch.zeros(experts, dtype=torch.int32, device=device)
    grid = (-(-pairs // CHUNK),)
    triton_kernels("experts/bf16").count_pairs[grid](
        chosen, lookup, local, counts, pairs, known, experts, MAPPED=mapped, CHUNK=CHUNK
    )
    bins = 1 << experts.bit_length()
    triton_kernels("experts/bf16").place_experts[(experts + 1,)](
        counts, starts, cursors, blocks[0], blocks[-1], most, pairs, experts, BINS=bins, **sizes
    )
    triton_kernels("experts/bf16").scatter_pairs[grid](local, cursors, order, pairs, experts, CHUNK=CHUNK)
    return Order(local, order, starts, counts, blocks)


@kernel_operation(
    "moe_bf16",
    f"x bf16[T,H], gate_up_proj bf16[E,2*I,H], down_proj bf16[E,H,I], {ROUTING} -> out bf16[T,H]; H % 128 == 0;"
    f" I % 128 == 0; {MAPPED}",
)
def moe_bf16(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None = None,
    how: list[int] | None = None,
    *,
    out: Tensor,
) -> None:
    """Sum over each token's chosen experts of weight * down(silu(gate(x)) * up(x)).

    Sums are float32; the intermediate and the pairs' outputs are rounded to bfloat16.

    Args:
        gate_up_proj: gate rows first.
        topk_indices .. expert_map: as `moe_fp8` takes them.
        how: the fields of `Launch` in order, to pin it; None chooses by the number of pairs.
    """
    (experts, hidden, inter), top_k = down_proj.shape, topk_indices.shape[1]
    local_top_k = top_k if expert_map is None else top_k * experts / expert_map.shape[0]
    for begin, end in token_ranges(x.shape[0], lambda count: 2 * count * top_k * (hidden + inter)):
        part = x[begin:end], topk_indices[begin:end], topk_weights[begin:end], out[begin:end]
        passes = [Pass(Launch(*how))] if how else choose_passes(end - begin, local_top_k, experts)
        run(*part, gate_up_proj, down_proj, expert_map, passes)


def run(
    x: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    out: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    expert_map: Tensor | None,
    passes: Sequence[Pass],
) -> None:
    """`moe_bf16` into `out` with one or two passes pinned, arguments unchecked."""
    (tokens, top_k), (experts, hidden, inter) = topk_indices.shape, down_proj.shape
    if not tokens:
        return
    order, kernels = sort_pairs(topk_indices, expert_map, experts, passes), triton_kernels("experts/bf16")
    middle, parts = (x.new_empty(tokens * top_k, size) for size in (inter, hidden))

    def multiply(one: Pass, blocks: Tensor) -> None:
        how = fit(one.launch, x.device)
        sorted_pairs = order.pairs, order.starts, order.counts, blocks, one.least
        sizes = {"HIDDEN": hidden, "INTER": inter, "ROWS": how.rows}
        options = {"num_warps": how.warps, "num_stages": how.stages}
        width, step = divisor(inter, how.width), divisor(hidden, how.step)
        kernels.gate_up[(inter // width, len(blocks))](
            x, gate_up_proj, *sorted_pairs, middle, top_k, experts, **sizes, WIDTH=width, STEP=step, **options
        )
        width, step = divisor(hidden, 2 * how.width), divisor(inter, how.step)  # one sum instead of two
        kernels.down[(hidden // width, len(blocks))](
            middle, down_proj, *sorted_pairs, topk_weights, parts, experts, **sizes, WIDTH=width, STEP=step, **options
        )

    calls = [partial(multiply, one, blocks) for one, blocks in zip(passes, order.blocks, strict=True)]
    if len(calls) > 1:
        # The crowded experts' few blocks first, the others' where they leave room.
        beside(calls[1], calls[0], x.device, priority=-1)
    else:
        calls[0]()
    kernels.combine[(tokens, -(-hidden // 1024))](parts, order.local, out, top_k, experts, HIDDEN=hidden, WIDTH=1024)
