"""The noaux_tc gate in one launch: `torch.ops.kimi_k2.fused_gate`, for `kimi_k2.model.moe.noaux_tc_gate`.

Takes what that operation takes with n_group = 1. Two strategies give the same bits: one warp a token
(csrc/gate_warp.cuh) and, for many tokens and 256 or 384 experts, four tokens a warp (csrc/gate_packed.cuh). Unlike the
plain operation, a NaN score (of a NaN logit or bias) is never preferred to a number, and weighs zero if too few numbers
are left; infinite logits are the limits 0 and 1 of the sigmoid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import Structure, structure

MAX_EXPERTS = 512
MAX_TOP_K = 16
PACKED_EXPERTS = (256, 384)
# From here on four tokens a warp are faster than one (H200).
PACKED_TOKENS = 4096
GateArguments = structure("router/csrc/gate.cuh", "GateArgs")


# What a gate chooses of E experts, and what else it takes.
CHOICE = "e_score_correction_bias f32[E]"
LIMITS = f"0 < E <= {MAX_EXPERTS} and E % 4 == 0; 0 < top_k <= min({MAX_TOP_K}, E)"
VALID = "num_valid i32[*N]?"
CHOSEN = (
    "indices index_dtype[T,top_k], weights f32[T,top_k]; index_dtype in (i32, i64);"
    " num_valid is None or num_valid.numel() == 1"
)


def warps_a_block(tokens: int) -> int:
    """Warps of a thread block of the strategy of one warp a token: small blocks spread few tokens over the chip."""
    return 1 if tokens <= 2048 else 4


@kernel_operation(
    "fused_gate",
    f"logits f32[T,E], {CHOICE}, {VALID} -> {CHOSEN}; {LIMITS}",
)
def fused_gate(
    logits: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    num_valid: Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    *,
    indices: Tensor,
    weights: Tensor,
) -> None:
    """Choose experts by sigmoid(logits) + bias, weigh them by sigmoid(logits).

    Args:
        norm_topk_prob: divide the weights by their sum + 1e-20.
        routed_scaling_factor: multiplies the weights.
        num_valid: one value on the device: tokens from it on are padding, with index 0 and weight 0.
        index_dtype: torch.int64, or torch.int32 for kernels that take it.

    Returns:
        topk_indices and topk_weights [T, top_k], by falling biased score, equal ones by index.
    """
    tokens, experts = logits.shape
    arguments = gate_arguments(
        e_score_correction_bias, indices, weights, norm_topk_prob, routed_scaling_factor, num_valid
    )
    arguments.logits = logits.data_ptr()
    arguments.packed = experts in PACKED_EXPERTS and tokens >= PACKED_TOKENS
    arguments.warps = warps_a_block(tokens)
    launch_gate(arguments, logits.device)


def launch_gate(arguments: Structure, device: torch.device) -> None:
    """The gate's kernel on the device's current stream; KernelError if it cannot be launched."""
    launch("router/gate", "kimi_gate", "the gate", device, arguments)


def gate_arguments(
    bias: Tensor,
    indices: Tensor,
    weights: Tensor,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    num_valid: Tensor | None,
) -> Structure:
    """The kernel's arguments but for the logits and the strategy."""
    return GateArguments(
        bias=bias,
        num_valid=num_valid,
        indices=indices,
        weights=weights,
        tokens=indices.shape[0],
        experts=bias.shape[0],
        top_k=indices.shape[1],
        normalize=norm_topk_prob,
        indices64=indices.dtype == torch.int64,
        sm_count=hopper(bias.device.index, "the gate")[1],
        programmatic=1,
        scale=routed_scaling_factor,
    )
