"""The router's kernels in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import is_hopper
from kimi_k2.kernels.linear.dense_gemm import dense_gemm
from kimi_k2.kernels.router import norm_route
from kimi_k2.kernels.router.gate import MAX_EXPERTS, MAX_TOP_K, fused_gate
from kimi_k2.kernels.router.router_gemm import MAX_TOKENS, router_decode, router_gemm
from kimi_k2.ops import experts as ops_experts
from kimi_k2.ops.experts import GateOptions
from kimi_k2.ops.registry import batch_invariant, is_decoding


def _weighting(options: GateOptions) -> tuple[bool, float]:
    """norm_topk_prob and routed_scaling_factor, with the plain function's defaults."""
    return options.get("norm_topk_prob", True), options.get("routed_scaling_factor", 1.0)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Indices and weights of successive tokens as one."""
    return parts[0] if len(parts) == 1 else (torch.cat([one[0] for one in parts]), torch.cat([one[1] for one in parts]))


def _supports_route(
    x: Tensor,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    **options: Unpack[GateOptions],
) -> bool:
    """BF16 tokens without expert groups; up to 64 of 256 or 384 experts, more of up to 512."""
    experts, hidden = weight.shape
    fits = experts in (256, 384) if x.shape[0] <= MAX_TOKENS else experts % 32 == 0 and experts <= MAX_EXPERTS
    return (
        is_hopper(x.device)
        and x.dtype == weight.dtype == torch.bfloat16
        and e_score_correction_bias.dtype == torch.float32
        and x.shape[0] > 0
        and fits
        and hidden % 256 == 0
        and options.get("n_group", 1) == 1
        and 0 < top_k <= MAX_TOP_K
        and (not batch_invariant() or experts in (256, 384))
    )


@ops_experts.route.entry(
    "router", takes=_supports_route, batch_invariant="64 tokens together in a decode step; prompts by dense_gemm"
)
def route(
    x: Tensor,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    **options: Unpack[GateOptions],
) -> tuple[Tensor, Tensor]:
    """`router_decode`, for more tokens `router_gemm` and `fused_gate`."""
    how = e_score_correction_bias, top_k, *_weighting(options)
    if batch_invariant() and not is_decoding():
        return fused_gate(dense_gemm(x.contiguous(), weight.contiguous(), 1, True), *how)
    if batch_invariant() or x.shape[0] <= MAX_TOKENS:
        return _joined([router_decode(part.contiguous(), weight, *how) for part in x.split(MAX_TOKENS)])
    return fused_gate(router_gemm(x.contiguous(), weight), *how)


def _supports_add_norm_route(
    x: Tensor,
    delta: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    **options: Unpack[GateOptions],
) -> bool:
    """A few tokens; any number in a decode step of batch-invariant mode."""
    n_group = options.get("n_group", 1)
    if not batch_invariant():
        return norm_route.supports(x, weight, top_k, n_group=n_group)
    if not (is_decoding() and x.is_contiguous()):
        return False
    if e_score_correction_bias.dtype != torch.float32 or weight.shape[0] not in (256, 384):
        return False
    return norm_route.supports_uniform(x, weight, top_k, n_group=n_group)


@ops_experts.add_norm_route.entry(
    "cuda",
    takes=_supports_add_norm_route,
    joins={"add_norm": "fused", "route": "router"},
    batch_invariant="the order of a few tokens' launch",
)
def add_norm_route(
    x: Tensor,
    delta: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    **options: Unpack[GateOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm_route.add_norm_route`; for more tokens launches that sum in the same order."""
    how = weight, e_score_correction_bias, top_k, *_weighting(options)
    if x.shape[0] <= norm_route.MAX_TOKENS:
        return norm_route.add_norm_route(x, delta, norm_weight, eps, *how)
    total, normed, unscaled, inverse = norm_route.route_norm(x, delta, norm_weight, eps)
    parts = zip(unscaled.split(MAX_TOKENS), inverse.split(MAX_TOKENS), strict=True)
    return total, normed, *_joined([router_decode(rows, *how, inverse=factor) for rows, factor in parts])
