"""Residual sum, norm, router and gate between attention and the experts, for a few tokens in one launch.

The operation is `torch.ops.kimi_k2.add_norm_route`.
`add_norm` and `router_decode` in one operation: csrc/router_gemm.cuh applies the norm's quotient to the finished sums.
`route_norm` and `router_decode` give any number of tokens the bits of that launch, for batch-invariant mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.router import router_gemm
from kimi_k2.kernels.router.gate import empty_routing, gate_arguments
from kimi_k2.kernels.router.router_gemm import all_resident, check_decode, router_decode
from kimi_k2.kernels.rowwise.decode import add_norm, check_add

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


def _check(
    x: Tensor, delta: Tensor, norm_weight: Tensor, weight: Tensor, e_score_correction_bias: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The empty results, if the arguments are what the kernel takes."""
    check_add(x, delta, norm_weight)
    check_decode(x, weight, e_score_correction_bias, top_k, None, torch.int64, 0)
    return torch.empty_like(x), torch.empty_like(x), *empty_routing(x.shape[0], top_k, torch.int64, x.device)


@kernel_operation("add_norm_route")
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + delta, its RMSNorm, and the experts that the norm is routed to.

    Args:
        x, delta: bfloat16 [T, H], H a multiple of 256.
        norm_weight: bfloat16 [H].
        weight: bfloat16 [E, H], E a multiple of 32.
        e_score_correction_bias .. routed_scaling_factor: as `router_decode` takes them.

    Returns:
        bfloat16 [T, H] twice, int64 [T, top_k], float32 [T, top_k]. In one launch the logits are those of
        bfloat16(norm_weight * (x + delta)), divided by the root mean square afterwards.

    Raises:
        KernelError: a shape, dtype or device that the kernels do not take, or a failed launch.
    """
    total, normed, indices, weights = _check(x, delta, norm_weight, weight, e_score_correction_bias, top_k)
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
    return total, normed, indices, weights


add_norm_route.fake(_check)


def supports_uniform(x: Tensor, weight: Tensor, top_k: int, *, n_group: int = 1) -> bool:
    """Whether any number of tokens like x can have the bits of the one launch: all but x's length decides."""
    fits = weight.shape[0] >= MIN_EXPERTS and x.shape[1] <= MAX_UNIFORM_HIDDEN
    if x.shape[0] == 0 or not fits or not router_gemm.supports_decode(x[:1], weight, top_k, n_group=n_group):
        return False
    return all_resident(weight.shape[0], hopper(x.device.index, "add_norm_route")[1])


def _check_norm(x: Tensor, delta: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_add(x, delta, norm_weight)
    total, normed, unscaled = (torch.empty_like(x) for _ in range(3))
    return total, normed, unscaled, x.new_empty(x.shape[0], dtype=torch.float32)


@kernel_operation("route_norm")
def route_norm(x: Tensor, delta: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The residual sum and norm of `add_norm_route`, bit for bit (csrc/route_norm.cuh).

    Args:
        x, delta, norm_weight: as `add_norm_route` takes them, H up to 7168.

    Returns:
        x + delta, its norm, bfloat16(norm_weight * (x + delta)), each bfloat16 [T, H], and float32 [T] times which the
        last one's logits are those of the norm.

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    made = _check_norm(x, delta, norm_weight)
    if x.shape[0]:
        operands = x, delta, norm_weight, *made, *x.shape, float(eps)
        launch("router/gate", "kimi_route_norm", "route_norm", x.device, *operands)
    return made


route_norm.fake(_check_norm)
