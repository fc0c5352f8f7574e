"""FP8 experts of a few tokens that have the bits of many: `torch.ops.kimi_k2.moe_few`.

For batch-invariant mode: what `moe_fp8` without fusion, `block_gemm` in two terms for the shared expert and the sum of
both make, in two launches. csrc/fp8_few.cu says how they work. Capture-safe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import hopper, is_hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import structure
from kimi_k2.kernels.experts.fp8 import BLOCK
from kimi_k2.kernels.experts.fp8_decode import check_with_shared
from kimi_k2.kernels.experts.launch import fill

MAX_TOKENS = 4
MAX_SLOTS, MAX_BLOCKS, MAX_HIDDEN = 10, 48, 8192  # blocks of 128 values of a token's intermediate
WIDTHS = (128, 256, 512)


Arguments = structure("experts/csrc/fp8_few.cu", "ExpertArguments")


def _fits(tokens: int, slots: int, hidden: int, inter: int) -> bool:
    wide = inter in WIDTHS and slots * inter <= MAX_BLOCKS * BLOCK and hidden <= MAX_HIDDEN
    return wide and slots <= MAX_SLOTS and 0 < tokens <= MAX_TOKENS


def supports(tokens: int, slots: int, hidden: int, inter: int, device: torch.device) -> bool:
    """Whether the kernel takes these sizes on this device; a shared expert is one of the slots."""
    return _fits(tokens, slots, hidden, inter) and is_hopper(device) and find_nvcc() is not None


def _check_sizes(down_proj: Tensor, topk_indices: Tensor, parts: list[int], shared_gate_up: Tensor | None) -> None:
    (tokens, top_k), (_, hidden, inter) = topk_indices.shape, down_proj.shape
    slots = top_k + (shared_gate_up is not None)
    if not _fits(tokens, slots, hidden, inter) or top_k < 2 or len(parts) != 3:
        raise KernelError(
            f"{tokens} tokens of {slots} experts, hidden {hidden}, intermediate {inter}, parts {parts}: expected at"
            f" most {MAX_TOKENS}, {MAX_SLOTS}, {MAX_HIDDEN}, one of {WIDTHS}, three"
        )


@kernel_operation("moe_few")
def moe_few(
    x: Tensor,
    gate_up_proj: Tensor,
    gate_up_proj_scale_inv: Tensor,
    down_proj: Tensor,
    down_proj_scale_inv: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    parts: list[int],
    expert_map: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
) -> Tensor:
    """`moe_fp8`, unfused with `splits2` 1, plus the shared expert by `block_gemm` in two terms: the same bits.

    Args:
        x .. shared_down_scale_inv: as `moe_decode` takes them; T up to 4, 2 <= k, I 128, 256 or 512.
        parts: of the columns that are summed apart: `splits1` of `moe_fp8`, and `cluster` of the shared expert's two
            launches of `block_gemm`.

    Returns:
        bfloat16 [T, H].

    Raises:
        KernelError: a shape, dtype or device that the kernel does not take, or a failed launch.
    """
    shared = (shared_gate_up, shared_gate_up_scale_inv, shared_down, shared_down_scale_inv)
    weights = (gate_up_proj, gate_up_proj_scale_inv, down_proj, down_proj_scale_inv)
    shape = check_with_shared(x, *weights, topk_indices, topk_weights, expert_map, *shared)
    tokens, top_k, _, _, inter = shape
    _check_sizes(down_proj, topk_indices, parts, shared_gate_up)
    hopper(x.device.index, "moe_few")
    slots = top_k + (shared_gate_up is not None)
    out = torch.empty_like(x)
    intermediate = torch.empty(tokens * slots * inter, dtype=torch.float32, device=x.device)
    given = (x, topk_indices, topk_weights, expert_map, *weights, *shared, intermediate, out)
    arguments = fill(Arguments, shape, topk_indices, expert_map, *given)
    arguments.up_parts, arguments.shared_up_parts, arguments.shared_down_parts = parts
    launch("experts/fp8_few", "kimi_experts_few", "moe_few", x.device, arguments)
    return out


moe_few.fake(check_with_shared, _check_sizes, lambda x: torch.empty_like(x))
