"""Attention heads of zeros, where a rank of many has fewer than the kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.engine.layer_step import LayerStep
from kimi_k2.kernels.attention.mla_sizes import HEADS
from kimi_k2.model.linear import Linear
from kimi_k2.ops.linear import Weight


def kernel_heads(heads: int) -> int | None:
    """The smallest head count >= `heads` that the kernels support; None if there is none."""
    return next((count for count in HEADS if count >= heads), None)


def pad_heads(step: LayerStep, heads: int) -> None:
    """Have the layer compute `heads` heads, those behind its own with weights of zero.

    Their queries are zero and their values too, so that nothing is added to what the layer makes. The layer's own
    weights become views of the padded ones.
    """
    own = len(step.w_uk)
    if heads == own:
        return
    attention = step.attention
    step.q_b, step.o = _padded(attention.q_b_proj, 0, own, heads), _padded(attention.o_proj, 1, own, heads)
    step.w_uk, step.w_uv = (_with_zeros(weight, 0, heads) for weight in (step.w_uk, step.w_uv))


def _padded(linear: Linear, dim: int, own: int, heads: int) -> Weight:
    """Of a weight with the heads along `dim`; every tensor of it has as many entries there for each head."""
    weight = linear.stored()
    tensors = {
        suffix: _with_zeros(tensor, dim, tensor.shape[dim] * heads // own) for suffix, tensor in weight.tensors.items()
    }
    linear.hold(
        {suffix: tensor.narrow(dim, 0, weight.tensors[suffix].shape[dim]) for suffix, tensor in tensors.items()}
    )
    return Weight(tensors, weight.quantization)


def _with_zeros(tensor: Tensor, dim: int, size: int) -> Tensor:
    shape = [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]
    padded = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    padded.view(torch.uint8).zero_()  # PyTorch fills no FP8
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded
