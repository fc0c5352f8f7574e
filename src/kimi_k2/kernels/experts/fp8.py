"""Blockwise FP8 routed experts on Hopper: `torch.ops.kimi_k2.moe_fp8`.

Weights are e4m3 with one float32 scale a 128x128 block; activations are quantized to e4m3 by groups of 128 values of a
token (scale = amax / 448), before each of the two GEMMs; sums are float32. csrc/fp8_kernel.cuh says how the
launch works. Capture-safe: see common/workspace.py for scratch memory.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import structure
from kimi_k2.kernels.common.workspace import Layout, lay_out
from kimi_k2.kernels.experts.launch import MAPPED, ROUTING, queues
from kimi_k2.kernels.experts.tuning import ExpertChoice, choices

BLOCK = 128
SLAB = 256
MAX_EXPERTS = 512
Arguments = structure("experts/csrc/fp8.cuh", "Fp8Args")


BLOCKS = (
    "gate_up_proj e4m3[E,2*I,H], gate_up_proj_scale_inv f32[E,2*I/128,H/128], down_proj e4m3[E,H,I],"
    " down_proj_scale_inv f32[E,H/128,I/128]"
)
LIMITS = f"H % {SLAB} == 0; I % {BLOCK} == 0; 0 < E <= {MAX_EXPERTS}; H <= {64 * BLOCK}; I <= {64 * BLOCK}; {MAPPED}"


def workspace_sizes(
    tokens: int, top_k: int, experts: int, hidden: int, inter: int, choice: ExpertChoice
) -> dict[str, tuple[int, torch.dtype]]:
    """Element count and dtype of every scratch buffer that one call needs."""
    pairs, groups = tokens * top_k, inter // BLOCK
    tiles = pairs if choice.fused else min(pairs, experts) + pairs // choice.max_tokens + 1
    split = tiles * groups * choice.splits1 * choice.max_tokens * 512 if choice.splits1 > 1 else 0
    parts = top_k * choice.splits2
    return {
        "xq": (0 if choice.fused else tokens * hidden, torch.uint8),
        "xs": (0 if choice.fused else tokens * hidden // BLOCK, torch.float32),
        "inter_q": (pairs * inter, torch.uint8),
        "inter_s": (pairs * groups, torch.float32),
        "partial": (split, torch.float32),
        "contrib": (tokens * parts * hidden if parts > 1 else 0, torch.float32 if choice.fused else torch.bfloat16),
        "ctrl": (4, torch.int32),
        "flags": (tiles * groups, torch.int32),
        "count1": (tiles * groups, torch.int32),
        "count2": ((tokens if choice.fused else 1) * (hidden // SLAB), torch.int32),
        "tiles": (tiles * 4, torch.int32),
        "num_tiles": (1, torch.int32),
        "sorted_pair": (pairs, torch.int32),
        "pair_slot": (pairs, torch.int32),
    }


@functools.lru_cache(maxsize=1024)
def _layout(tokens: int, top_k: int, experts: int, hidden: int, inter: int, choice: ExpertChoice) -> Layout:
    # Where tokens are summed as they finish, their counters wrap back to zero; those of slabs are cleared beforehand.
    counters = frozenset({"count1", "count2"} if choice.fused else {"count1"})
    return lay_out(workspace_sizes(tokens, top_k, experts, hidden, inter, choice), counters)


@kernel_operation("moe_fp8", f"x bf16[T,H], {BLOCKS}, {ROUTING} -> out bf16[T,H]; {LIMITS}")
def moe_fp8(
    x: Tensor,
    gate_up_proj: Tensor,
    gate_up_proj_scale_inv: Tensor,
    down_proj: Tensor,
    down_proj_scale_inv: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None = None,
    choice: list[int] | None = None,
    *,
    out: Tensor,
) -> None:
    """Sum over each token's chosen experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        gate_up_proj: gate rows first.
        topk_indices: global expert indices; a negative index contributes nothing.
        topk_weights: a weight of zero contributes nothing, and its expert is not read.
        expert_map: to the local expert or -1 (expert parallelism); None: all are local.
        choice: the fields of `ExpertChoice` in order, to pin the launch; None: the tuned one.

    Returns:
        Zeros for a token without a valid local pair.
    """
    shape = (*topk_indices.shape, *down_proj.shape)
    weights = {"w13": gate_up_proj, "s13": gate_up_proj_scale_inv, "w2": down_proj, "s2": down_proj_scale_inv}
    tensors = {"x": x, "out": out, "topk_ids": topk_indices, "topk_weights": topk_weights}
    choice_for = choices(choice, shape, "fp8_e4m3", "128x128", hopper(x.device.index, "moe_fp8")[0])
    for queue, _ in queues(Arguments, tensors, weights | {"expert_map": expert_map}, shape, choice_for, _layout):
        launch("experts/fp8", "kimi_moe_fp8", "moe_fp8", x.device, queue)
