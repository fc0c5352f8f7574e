"""SwiGLU (Shazeer 2020, arXiv 2002.05202) and the dropless mixture of SwiGLU experts, over weights as stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.ops.linear import Weight, by_rows, dequantize, in_blocks, linear_rows, project
from kimi_k2.ops.registry import COMPOSED, ELEMENTWISE, operation


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
