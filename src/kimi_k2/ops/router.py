"""The noaux_tc router of DeepSeek-V3 and Kimi-K2 (arXiv 2412.19437, section 2.1.2)."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from kimi_k2.ops.linear import add_norm, by_rows, linear_rows
from kimi_k2.ops.registry import COMPOSED, operation

# Keeps the normalisation finite when all chosen scores underflow; the value is part of the reference.
NORM_GUARD = 1e-20


class GateOptions(TypedDict, total=False):
    """Options of `noaux_tc_gate`, which says what they mean."""

    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


def noaux_tc_gate(
    logits: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose experts by biased scores and weigh them by unbiased ones.

    scores = sigmoid(logits); with n_group > 1 only the topk_group groups with the largest sum of their two best
    biased scores take part; the top_k largest of scores + bias are chosen, equal ones by the lower index; the weights
    are their unbiased scores, divided by their sum + 1e-20 if norm_topk_prob, times routed_scaling_factor.

    Args:
        logits: float32 (or float64) [T, E].
        e_score_correction_bias: [E], used for the choice only.
        top_k: experts a token.
        n_group: groups of equally many experts.
        topk_group: groups that take part.
        norm_topk_prob: whether a token's weights add up to routed_scaling_factor.
        routed_scaling_factor: factor of the weights.

    Returns:
        (topk_indices int64 [T, top_k], topk_weights [T, top_k] in the logits' dtype), by falling biased score.

    Raises:
        ValueError: top_k, n_group and topk_group do not fit the number of experts.
    """
    tokens, experts = logits.shape
    if experts % n_group or topk_group > n_group or top_k > experts // n_group * topk_group:
        raise ValueError(f"top_k={top_k}, n_group={n_group}, topk_group={topk_group} do not fit {experts} experts")
    scores = logits.sigmoid()
    choice = scores + e_score_correction_bias
    if n_group > 1:
        grouped = choice.view(tokens, n_group, experts // n_group)
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        chosen = _top(group_scores, topk_group)
        mask = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, chosen, False)
        choice = grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(1)
    topk_indices = _top(choice, top_k)
    topk_weights = scores.gather(1, topk_indices)
    if norm_topk_prob:
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + NORM_GUARD)
    return topk_indices, topk_weights * routed_scaling_factor


def _top(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest a row; torch.topk leaves the order of ties open, a stable sort does not."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """[T, H] times the gate weight [E, H]: float32 [T, E] (float64 for float64 input)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return linear_rows(x.to(wide), weight.to(wide))


@operation
def route(
    x: Tensor,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    **options: Unpack[GateOptions],
) -> tuple[Tensor, Tensor]:
    """`router_logits`, then `noaux_tc_gate` with its options."""
    logits = router_logits(x, weight)
    chosen: tuple[Tensor, Tensor] = by_rows(
        lambda rows: noaux_tc_gate(rows, e_score_correction_bias, top_k, **options), logits
    )
    return chosen


@operation(batch_invariant=COMPOSED)
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
    """Residual sum, norm and routing between attention and the experts.

    Args:
        x: [T, H].
        delta: [T, H].
        norm_weight: [H].
        eps: of the norm.
        weight: as `route` takes it.
        e_score_correction_bias: as `route` takes it.
        top_k: as `route` takes it.
        options: as `route` takes them.

    Returns:
        (x + delta [T, H], its norm [T, H], topk_indices int64 [T, top_k], topk_weights [T, top_k]).
    """
    total, normed = add_norm(x, delta, norm_weight, eps)
    return total, normed, *route(normed, weight, e_score_correction_bias, top_k, **options)
