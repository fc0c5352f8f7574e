"""The kernels with their own signatures, under the plain functions' arguments (see `ops.registry`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k2.kernels.attention import mla_decode
from kimi_k2.kernels.common.hardware import is_hopper
from kimi_k2.kernels.experts.fp8 import BLOCK, SLAB, moe_fp8
from kimi_k2.kernels.experts.fp8 import MAX_EXPERTS as MAX_HELD
from kimi_k2.kernels.router.gate import MAX_EXPERTS, MAX_TOP_K, fused_gate
from kimi_k2.kernels.router.router_gemm import MAX_TOKENS, router_decode, router_gemm


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
        and n_group == 1
        and 0 < top_k <= MAX_TOP_K
    )


def route(
    x: Tensor, weight: Tensor, e_score_correction_bias: Tensor, top_k: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """`router_decode`, for more tokens `router_gemm` and `fused_gate`, with the plain function's arguments."""
    how = top_k, options.get("norm_topk_prob", True), options.get("routed_scaling_factor", 1.0)
    chosen: tuple[Tensor, Tensor]
    if x.shape[0] <= MAX_TOKENS:
        chosen = router_decode(x.contiguous(), weight, e_score_correction_bias, *how)
    else:
        chosen = fused_gate(router_gemm(x.contiguous(), weight), e_score_correction_bias, *how)
    return chosen


def supports_mla_absorbed_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, positions: Tensor, softmax_scale: float
) -> bool:
    """One new token a sequence, in BF16, of sizes that `mla_decode` takes; the cache in one piece."""
    if q_latent.shape[1] != 1 or not cache.is_contiguous() or not is_hopper(cache.device):
        return False
    query = torch.cat((q_latent, q_rope), dim=-1).squeeze(1)
    return mla_decode.supports(query, cache, positions.squeeze(1).int())


def mla_absorbed_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, positions: Tensor, softmax_scale: float
) -> Tensor:
    """`mla_decode` with the plain function's arguments; padding attends to slot 0, as there."""
    query = torch.cat((q_latent, q_rope), dim=-1).squeeze(1)
    seq_lens = (positions.squeeze(1).clamp(min=0) + 1).int()
    return mla_decode.mla_decode(query, cache, seq_lens, softmax_scale).unsqueeze(1)


def supports_routed_experts(x: Tensor, experts: Any, topk_indices: Tensor, topk_weights: Tensor) -> bool:
    """FP8 blocks of 128x128 kept as stored, BF16 tokens."""
    down = experts.down_proj if "down_proj_scale_inv" in experts._buffers else None
    return (
        down is not None
        and is_hopper(x.device)
        and x.dtype == torch.bfloat16
        and down.shape[1] % SLAB == 0
        and down.shape[2] % BLOCK == 0
        and max(down.shape[1:]) <= 64 * BLOCK
        and down.shape[0] <= MAX_HELD
        and experts.down_proj_scale_inv.shape == (down.shape[0], down.shape[1] // BLOCK, down.shape[2] // BLOCK)
    )


def routed_experts(x: Tensor, experts: Any, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """`moe_fp8` over the experts that this rank holds."""
    return moe_fp8(
        x.contiguous(),
        experts.gate_up_proj,
        experts.gate_up_proj_scale_inv,
        experts.down_proj,
        experts.down_proj_scale_inv,
        topk_indices.contiguous(),
        topk_weights.float().contiguous(),
        experts.expert_map(),
    )
