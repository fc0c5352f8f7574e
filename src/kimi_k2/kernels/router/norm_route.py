"""Residual sum, norm, router and gate between attention and the experts, for a few tokens in one launch.

The operation is `torch.ops.kimi_k2.add_norm_route`.
`add_norm` and `router_decode` in one operation: csrc/router_gemm.cuh applies the norm's quotient to the finished sums.
`route_norm` and `router_decode` give any number of tokens the bits of that launch, for batch-invariant mode.
"""

from __future__ import annotations

from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.router import router_gemm
from kimi_k2.kernels.router.gate import CHOICE, gate_arguments
from kimi_k2.kernels.router.router_gemm import DECODE, all_resident, router_decode
from kimi_k2.kernels.rowwise.decode import add_norm

MAX_TOKENS = 8
MIN_EXPERTS = 32
MAX_UNIFORM_HIDDEN = 7168


def supports(x: Tensor, weight: Tensor, top_k: int, *, n_group: int = 1) -> bool:
    """A few tokens that `router_decode` takes, two clusters of experts."""
    return (
        0 < x.shape[0] <= MAX_TOKENS
        and weight.shape[0] >= MIN_EXPERTS
        and router_gemm.supports_decode(x, weight, top_k, n_group=n_group)
    )


SUMMANDS = "x bf16[T,H], delta bf16[T,H], norm_weight bf16[H]"


@kernel_operation(
    "add_norm_route",
    f"{SUMMANDS}, weight bf16[E,H], {CHOICE} -> total bf16[T,H], normed bf16[T,H], indices i64[T,top_k],"
    f" weights f32[T,top_k]; {DECODE}",
)
def add_norm_route(
    x: Tensor,
    delta: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    *,
    total: Tensor,
    normed: Tensor,
    indices: Tensor,
    weights: Tensor,
) -> tuple[Tensor, ...] | None:
    """x + delta, its RMSNorm, and the experts that the norm is routed to.

    Args:
        e_score_correction_bias .. routed_scaling_factor: as `router_decode` takes them.

    Returns:
        In one launch the logits are those of bfloat16(norm_weight * (x + delta)), divided by the root mean square
        afterwards.
    """
    gate = gate_arguments(e_score_correction_bias, indices, weights, norm_topk_prob, routed_scaling_factor, None)
    fits = 0 < x.shape[0] <= MAX_TOKENS and weight.shape[0] >= MIN_EXPERTS
    scratch = router_gemm.absent_logits(x.device) if fits and all_resident(weight.shape[0], gate.sm_count) else None
    if scratch is None:
        total, normed = add_norm(x, delta, norm_weight, eps)
        options = norm_topk_prob, routed_scaling_factor
        return total, normed, *router_decode(normed, weight, e_score_correction_bias, top_k, *options)
    router_gemm.launch_router(
        x, weight, scratch, gate, delta=delta, norm=norm_weight, total=total, normed=normed, eps=eps
    )
    return None


def supports_uniform(x: Tensor, weight: Tensor, top_k: int, *, n_group: int = 1) -> bool:
    """Whether any number of tokens like x can have the bits of the one launch: all but x's length decides."""
    fits = weight.shape[0] >= MIN_EXPERTS and x.shape[1] <= MAX_UNIFORM_HIDDEN
    if x.shape[0] == 0 or not fits or not router_gemm.supports_decode(x[:1], weight, top_k, n_group=n_group):
        return False
    return all_resident(weight.shape[0], hopper(x.device.index, "add_norm_route")[1])


@kernel_operation(
    "route_norm",
    f"{SUMMANDS} -> total bf16[T,H], normed bf16[T,H], unscaled bf16[T,H], inverse f32[T]; H <= {MAX_UNIFORM_HIDDEN}",
)
def route_norm(
    x: Tensor, delta: Tensor, norm_weight: Tensor, eps: float, *, total: Tensor, normed: Tensor, unscaled: Tensor,
    inverse: Tensor,
) -> None:  # fmt: skip
    """The residual sum and norm of `add_norm_route`, bit for bit (csrc/route_norm.cuh).

    Returns:
        x + delta, its norm, bfloat16(norm_weight * (x + delta)), and times which the last one's logits are those of
        the norm.
    """
    operands = x, delta, norm_weight, total, normed, unscaled, inverse, *x.shape, float(eps)
    launch("router/gate", "kimi_route_norm", "route_norm", x.device, *operands)
