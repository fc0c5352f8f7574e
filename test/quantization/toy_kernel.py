"""A kernel of experts in `toy_format`, as a package of its own would offer it: a module whose import adds an entry."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.experts import ExpertWeights, routed_experts, silu_and_mul
from kimi_k2.ops.linear import dequantize


def _takes(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> bool:
    kind = experts.gate_up.quantization
    return kind is not None and kind.name == "toy-int8"


@routed_experts.entry("toy_int8", takes=_takes, before="moe_decode")
def toy_experts(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """All experts of all tokens, of which those not chosen weigh zero."""
    weights = x.new_zeros(len(x), experts.num_experts).scatter_(1, topk_indices, topk_weights)
    hidden = torch.einsum("th,eih->tei", x, dequantize(experts.gate_up, x.dtype))
    return torch.einsum("te,tei,ehi->th", weights, silu_and_mul(hidden), dequantize(experts.down, x.dtype))
