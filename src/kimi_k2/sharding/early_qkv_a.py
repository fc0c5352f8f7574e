"""Weights of early down projections: q_a and kv_a of a layer, summed together with the experts' output before it.

The attention of layer l + 1 reads y = h + sum over ranks r of W_down,r a_r: the residual h behind attention in layer l,
and what each rank's part of the routed and shared experts sends through its columns of the down projections. Up to the
norm's scalar q_a and kv_a are linear in it. With A = W_a diag(gamma), W_a both matrices and gamma the weight of
input_layernorm of layer l + 1:

    W_a norm(y) = rsqrt(mean(y^2) + eps) * (A h + sum over r of (A W_down,r) a_r)

So rank r needs its slice of A for as many columns of h, and A W_down,r of every expert that it holds a part of. They
are tensors of layer l, with `decode: layers`; the last layer has none, nor have dense ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.stored import Stored, format_of
from kimi_k2.sharding.layout import Layout, PlannedTensor

NAME = "early_qkv_a"
RESIDUAL = f"{NAME}.residual_weight"
SOURCES = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "input_layernorm")


def precedes_another(config: KimiK2Config, layer: int) -> bool:
    """Whether a decoder layer has the weights of the one behind it."""
    return 0 <= layer < config.num_hidden_layers - 1 and config.is_moe_layer(layer)


def early_qkv_a_tensors(config: KimiK2Config, layout: Layout, layer: int) -> Iterator[PlannedTensor]:
    """The weights that MoE layer `layer`, which has one behind it, holds: [inputs, columns], inputs divided."""
    root, columns, width = f"layers.{layer}", config.qkv_a_dim, config.moe_intermediate_size
    ranks, tp, ep = layout.ranks, layout.moe_tp, layout.moe_ep
    for name, shape, dim, parts, groups in (
        (RESIDUAL, (config.hidden_size, columns), 0, ranks, 1),
        (f"mlp.experts.{NAME}.weight", (config.n_routed_experts, width, columns), 1, tp, ep),
        (f"mlp.shared_experts.{NAME}.weight", (1, width * config.n_shared_experts, columns), 1, ranks, 1),
    ):
        yield PlannedTensor(f"{root}.{name}", layout.dtype, shape, layer, dim, 1, parts, groups)


def scaled_projections(config: KimiK2Config, layer: int, read: Callable[[str], Stored]) -> Tensor:
    """A = W_a diag(gamma) of a layer, float32 [qkv_a_dim, H].

    Args:
        config: of the model.
        layer: whose projections.
        read: stored tensors of a module by suffix.
    """
    *projections, norm = (f"model.layers.{layer}.{name}" for name in SOURCES)
    gamma = read(norm)["weight"].to(torch.float32)
    weights = [
        format_of(config.quantization, projection).dequantize(read(projection), torch.float32)
        for projection in projections
    ]
    return torch.cat(weights).mul_(gamma)


def fold(scaled: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """(A W_down)^T, [width, columns] in `dtype`; computed in float32.

    Args:
        scaled: A, float32 [columns, H].
        down: float32 [H, width], what a rank's down projection holds: where it is requantized, A is applied to that.
        dtype: of the result.
    """
    return (down.T @ scaled.T).to(dtype)
