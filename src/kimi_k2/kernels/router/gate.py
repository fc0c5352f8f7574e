"""The noaux_tc gate in one launch: `torch.ops.kimi_k2.fused_gate`, for `kimi_k2.model.moe.noaux_tc_gate`.

Takes what that operation takes with n_group = 1. Two strategies give the same bits: one warp a token
(csrc/gate_warp.cuh) and, for many tokens and 256 or 384 experts, four tokens a warp (csrc/gate_packed.cuh). Unlike the
plain operation, a NaN score (of a NaN logit or bias) is never preferred to a number, and weighs zero if too few numbers
are left; infinite logits are the limits 0 and 1 of the sigmoid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import Structure, structure

MAX_EXPERTS = 512
MAX_TOP_K = 16
PACKED_EXPERTS = (256, 384)
# From here on four tokens a warp are faster than one (H200).
PACKED_TOKENS = 4096
STRATEGIES = ("auto", "warp", "packed")
GateArguments = structure("router/csrc/gate.cuh", "GateArgs")


def check_gate(
    bias: Tensor, experts: int, top_k: int, num_valid: Tensor | None, index_dtype: torch.dtype, device: torch.device
) -> None:
    """KernelError naming the argument that the gate does not take, and what was expected."""
    if not 0 < experts <= MAX_EXPERTS or experts % 4:
        raise KernelError(f"{experts} experts: expected a multiple of 4 up to {MAX_EXPERTS}")
    if not 0 < top_k <= min(MAX_TOP_K, experts):
        raise KernelError(f"top_k {top_k}: expected 1 to {min(MAX_TOP_K, experts)}")
    if index_dtype not in (torch.int32, torch.int64):
        raise KernelError(f"index_dtype {index_dtype}: expected torch.int32 or torch.int64")
    if bias.dtype != torch.float32 or tuple(bias.shape) != (experts,):
        actual = f"{bias.dtype} {tuple(bias.shape)}"
        raise KernelError(f"e_score_correction_bias is {actual}, expected torch.float32 {(experts,)}")
    if not bias.is_contiguous() or bias.device != device:
        raise KernelError(f"e_score_correction_bias must be contiguous and on {device}")
    if num_valid is not None and (
        num_valid.dtype != torch.int32 or num_valid.numel() != 1 or num_valid.device != device
    ):
        raise KernelError(f"num_valid must be one torch.int32 on {device}")


def _check_arguments(
    logits: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    num_valid: Tensor | None,
    index_dtype: torch.dtype,
    strategy: str,
    warps: int,
) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        actual = f"{logits.dtype} {tuple(logits.shape)}"
        raise KernelError(f"logits is {actual}, expected contiguous torch.float32 of 2 dimensions")
    check_gate(e_score_correction_bias, logits.shape[1], top_k, num_valid, index_dtype, logits.device)
    if strategy not in STRATEGIES:
        raise KernelError(f"strategy {strategy!r}: expected one of {STRATEGIES}")
    if not 0 <= warps <= 8:
        raise KernelError(f"warps {warps}: expected 0 to 8")
    if strategy == "packed" and logits.shape[1] not in PACKED_EXPERTS:
        raise KernelError(f"strategy 'packed' takes {PACKED_EXPERTS} experts, not {logits.shape[1]}")


def empty_routing(tokens: int, top_k: int, index_dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """topk_indices and topk_weights [tokens, top_k], unwritten."""
    indices = torch.empty(tokens, top_k, dtype=index_dtype, device=device)
    return indices, torch.empty(tokens, top_k, dtype=torch.float32, device=device)


def use_packed(tokens: int, experts: int, strategy: str) -> bool:
    """Whether four tokens share a warp."""
    return strategy == "packed" or (strategy == "auto" and experts in PACKED_EXPERTS and tokens >= PACKED_TOKENS)


def warps_a_block(tokens: int) -> int:
    """Warps of a thread block of the strategy of one warp a token: small blocks spread few tokens over the chip."""
    return 1 if tokens <= 2048 else 4


@kernel_operation("fused_gate")
def fused_gate(
    logits: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    num_valid: Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    strategy: str = "auto",
    warps: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose experts by sigmoid(logits) + bias, weigh them by sigmoid(logits).

    Args:
        logits: float32 [T, E], E a multiple of 4 up to 512.
        e_score_correction_bias: float32 [E].
        top_k: at most 16.
        norm_topk_prob: divide the weights by their sum + 1e-20.
        routed_scaling_factor: multiplies the weights.
        num_valid: int32, one value on the device: tokens from it on are padding, with index 0 and weight 0.
        index_dtype: torch.int64, or torch.int32 for kernels that take it.
        strategy: "warp" or "packed" to pin one; "auto" chooses by token count.
        warps: warps of a block where a warp has one token, up to 8; 0 chooses.

    Returns:
        (topk_indices [T, top_k], topk_weights float32 [T, top_k]), by falling biased score, equal ones by index.

    Raises:
        KernelError: a shape, dtype or device that the kernel does not take, or a failed launch.
    """
    _check_arguments(logits, e_score_correction_bias, top_k, num_valid, index_dtype, strategy, warps)
    tokens, experts = logits.shape
    indices, weights = empty_routing(tokens, top_k, index_dtype, logits.device)
    if tokens == 0:
        return indices, weights
    arguments = gate_arguments(
        e_score_correction_bias, indices, weights, norm_topk_prob, routed_scaling_factor, num_valid
    )
    arguments.logits = logits.data_ptr()
    arguments.packed = use_packed(tokens, experts, strategy)
    arguments.warps = warps or warps_a_block(tokens)
    launch_gate(arguments, logits.device)
    return indices, weights


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


fused_gate.fake(
    _check_arguments,
    lambda logits, top_k, index_dtype: empty_routing(logits.shape[0], top_k, index_dtype, logits.device),
)
