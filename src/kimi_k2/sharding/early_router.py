"""Weights of the early router, whose logits are summed over the ranks together with the attention's output.

A router reads x = h + sum over ranks r of W_o,r a_r: the residual h before attention, and each rank's heads a_r through
its columns of o_proj. Up to the norm's scalar its logits are linear in it. With G = W_gate diag(gamma), gamma the
weight of post_attention_layernorm:

    logits = rsqrt(mean(x^2) + eps) * (G h + sum over r of (G W_o,r) a_r)

So a rank needs its slice of G for as many columns of h, and G W_o,r, instead of all of W_gate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.stored import Stored, StoredFormat
from kimi_k2.sharding.layout import Layout, PlannedTensor

SOURCES = ("mlp.gate", "post_attention_layernorm", "self_attn.o_proj")
RESIDUAL, HEADS = "early_router.residual_weight", "early_router.heads_weight"
# Sums over all hidden values are to round less than the scores that experts are chosen by.
DTYPE = torch.float32


def early_router_tensors(config: KimiK2Config, layout: Layout, layer: int) -> Iterator[PlannedTensor]:
    """The two weights of a layer, [H, E] and [heads * v_head_dim, E], rows divided among the ranks."""
    values = config.num_attention_heads * config.v_head_dim
    for name, rows in ((RESIDUAL, config.hidden_size), (HEADS, values)):
        shape = (rows, config.n_routed_experts)
        yield PlannedTensor(f"layers.{layer}.{name}", DTYPE, shape, layer, 0, 1, layout.ranks)


def fold(gate: Tensor, gamma: Tensor, o_proj: Stored, source: StoredFormat) -> tuple[Tensor, Tensor]:
    """G^T and (G W_o)^T.

    Args:
        gate: W_gate [E, H].
        gamma: weight of post_attention_layernorm [H].
        o_proj: stored tensors of o_proj [H, heads * v_head_dim], dequantized here a few rows at a time.
        source: their format.

    Returns:
        float32 [H, E] and [heads * v_head_dim, E].
    """
    scaled = (gate.to(DTYPE) * gamma.to(DTYPE)).T.contiguous()
    folded: Tensor | None = None
    for rows, weight in source.dequantized_rows(o_proj):
        product = weight.to(DTYPE).T @ scaled[rows]
        folded = product if folded is None else folded.add_(product)
    assert folded is not None
    return scaled, folded
