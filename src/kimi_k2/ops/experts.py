"""The mixture of experts: the noaux_tc router, SwiGLU, and the dropless mixture, over weights as stored.

The router is that of DeepSeek-V3 and Kimi-K2 (arXiv 2412.19437, section 2.1.2), SwiGLU Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.ops.linear import Weight, add_norm, by_rows, dequantize, in_blocks, linear_rows, project
from kimi_k2.ops.registry import COMPOSED, ELEMENTWISE, operation

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
    """
    scores = logits.sigmoid()
    choice = scores + e_score_correction_bias
    if n_group > 1:
        grouped = choice.unflatten(1, (n_group, -1))
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


@operation
def route(
    x: Tensor,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    **options: Unpack[GateOptions],
) -> tuple[Tensor, Tensor]:
    """x [T, H] times the gate weight [E, H], in float32 (float64 for float64 input), then `noaux_tc_gate`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = linear_rows(x.to(wide), weight.to(wide))
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


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of a layer that a rank holds: numbers first_expert .. first_expert + num_experts - 1.

    Attributes:
        gate_up: [E, 2I, H], gate rows first.
        down: [E, H, I].
        first_expert: the model's number of the first one held.
        expert_map: int32 [experts of the model] to the place in these tensors, -1 for one not held; None: all are.
    """

    gate_up: Weight
    down: Weight
    first_expert: int = 0
    expert_map: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E, the experts held."""
        return next(iter(self.down.tensors.values())).shape[0]


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two [..., I]."""
    if not in_blocks(gate):
        return F.silu(gate) * up
    out: Tensor = by_rows(lambda one, other: F.silu(one) * other, gate.flatten(0, -2), up.flatten(0, -2))
    return out.view(gate.shape)


@operation(batch_invariant=ELEMENTWISE)
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2I], gate first: [..., I]."""
    return gated(*gate_up.chunk(2, dim=-1))


@operation(batch_invariant=COMPOSED)
def swiglu(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """down(silu(gate(x)) * up(x)).

    Args:
        x: [B, H].
        gate_up: [2I, H], gate rows first.
        down: [H, I].

    Returns:
        [B, H].
    """
    return project(silu_and_mul(project(x, gate_up)), down)


@operation
def routed_experts(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """Sum over each token's chosen experts of weight * expert(token); no token is ever dropped.

    Only experts that `experts` holds count, which under expert parallelism are some of those chosen.

    Args:
        x: [T, H].
        experts: weights of the experts that are here, and which of the model's they are.
        topk_indices: int64 [T, k], numbers of the model's experts.
        topk_weights: [T, k].

    Returns:
        [T, H] in x's dtype, accumulated in the wider of x's and the weights' dtype.
    """

    def mlp(number: int, token: Tensor) -> Tensor:
        gate_up = linear_rows(x[token], dequantize(experts.gate_up.expert(number), x.dtype))
        return linear_rows(silu_and_mul(gate_up), dequantize(experts.down.expert(number), x.dtype))

    return sum_by_expert(x, experts, topk_indices, topk_weights, mlp)


def sum_by_expert(
    x: Tensor,
    experts: ExpertWeights,
    topk_indices: Tensor,
    topk_weights: Tensor,
    mlp: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """`routed_experts` with an MLP of one's own, one expert after the other.

    Args:
        x, experts, topk_indices, topk_weights: as `routed_experts` takes them.
        mlp: of an expert's place in `experts` and the tokens int64 [n] that chose it, its outputs [n, H].
    """
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, topk_weights.dtype), device=x.device)
    local_indices = topk_indices - experts.first_expert
    # Read back to the host: a CUDA graph cannot hold this function.
    for number in local_indices.unique().tolist():
        if not 0 <= number < experts.num_experts:
            continue
        token, slot = torch.where(local_indices == number)
        out.index_add_(0, token, mlp(number, token) * topk_weights[token, slot, None])
    return out.to(x.dtype)


@operation(batch_invariant=COMPOSED)
def routed_experts_with_shared(
    x: Tensor,
    experts: ExpertWeights,
    topk_indices: Tensor,
    topk_weights: Tensor,
    shared_gate_up: Weight,
    shared_down: Weight,
) -> Tensor:
    """`routed_experts` plus the shared expert's `swiglu`, for few tokens: [T, H]."""
    routed = routed_experts(x, experts, topk_indices, topk_weights)
    return routed + swiglu(x, shared_gate_up, shared_down)
