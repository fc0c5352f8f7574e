"""The router for many tokens: a BF16 product with float32 sums, then the fused gate (replaces `model.router.route`).

Products of BF16 values are exact in float32, so the logits are those of the plain function but for the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k2.kernels.fused_gate import MAX_EXPERTS, MAX_TOP_K, fused_gate
from kimi_k2.kernels.hardware import is_hopper
from kimi_k2.kernels.router_gemm import router_gemm


def supports_route(
    x: Tensor,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
) -> bool:
    """BF16 tokens on a Hopper GPU, without expert groups."""
    experts, hidden = weight.shape
    return (
        is_hopper(x.device)
        and x.dtype == weight.dtype == torch.bfloat16
        and e_score_correction_bias.dtype == torch.float32
        and n_group == 1
        and experts % 32 == 0
        and hidden % 256 == 0
        and experts <= MAX_EXPERTS
        and 0 < top_k <= min(MAX_TOP_K, experts)
    )


def route(
    x: Tensor, weight: Tensor, e_score_correction_bias: Tensor, top_k: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """topk_indices int64 [T, k] and topk_weights float32 [T, k]."""
    logits = router_gemm(x.contiguous(), weight)
    normalize, scale = options.get("norm_topk_prob", True), options.get("routed_scaling_factor", 1.0)
    chosen: tuple[Tensor, Tensor] = fused_gate(logits, e_score_correction_bias, top_k, normalize, scale)
    return chosen
