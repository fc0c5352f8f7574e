"""What the plain functions compute with: in batch-invariant mode on a CPU, blocks of a fixed number of rows.

A GEMM library chooses its kernel, and with it the order of a sum, by the number of rows; a vectorized loop computes its
last values otherwise than the others. Blocks of one shape, padded with zeros, leave both nothing to choose. That a
block's kernel treats its rows alike is the library's affair: `test_batch_invariant.py` holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.ops.registry import batch_invariant

ROWS = 16  # of a block
SLOTS = 64  # of the cache that attention takes at a time


def in_blocks(x: Tensor) -> bool:
    """Whether functions of x go by blocks: in batch-invariant mode on a CPU. On a GPU entries of the table serve."""
    return batch_invariant() and not x.is_cuda


def by_rows(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """`function` of tensors [T, ...] whose row t gives row t of its result, or of each of its results."""
    count = len(tensors[0])
    if not in_blocks(tensors[0]) or not count:
        return function(*tensors)
    padded = [F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, -count % ROWS)) for tensor in tensors]
    made = [function(*block) for block in zip(*(tensor.split(ROWS) for tensor in padded), strict=True)]
    if isinstance(made[0], tuple):
        return tuple(torch.cat(parts)[:count] for parts in zip(*made, strict=True))
    return torch.cat(made)[:count]


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times W^T for W [N, K]: [..., N]."""
    if not in_blocks(x):
        return F.linear(x, weight)
    out: Tensor = by_rows(lambda block: F.linear(block, weight), x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], len(weight))


def linear_heads(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, S, H, K] times a matrix [H, K, N] a head, by blocks: [B, S, H, N]."""
    out: Tensor = by_rows(lambda block: torch.bmm(block.transpose(0, 1), weight).transpose(0, 1), x.flatten(0, 1))
    return out.view(*x.shape[:-1], weight.shape[-1])


def attend_blocks(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, softmax_scale: float) -> Tensor:
    """Causal attention with an online softmax over blocks of `SLOTS`, from the first slot on.

    Slots that a query does not see add exact zeros, so that its result does not depend on how many lie behind.

    Args:
        query: [B, S, H, D].
        key: [B, G, T, D], G either H or 1 for all heads.
        value: [B, G, T, V].
        positions: int64 [B, S]; a query sees slots 0..p, padding (negative) slot 0.

    Returns:
        [B, S, H, V] in the query's dtype, computed in float32 or wider.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    padding = (0, 0, 0, -key.shape[2] % SLOTS)
    keys, values = F.pad(key.to(wide), padding), F.pad(value.to(wide), padding)

    def of_sequence(row: int) -> Tensor:
        def of_queries(block: Tensor, place: Tensor) -> Tensor:
            return _attend(block.transpose(0, 1), keys[row], values[row], place.clamp(min=0), softmax_scale)

        made: Tensor = by_rows(of_queries, query[row].to(wide), positions[row])
        return made

    return torch.stack([of_sequence(row) for row in range(len(query))]).to(query.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, place: Tensor, softmax_scale: float) -> Tensor:
    """Queries [H, ROWS, D] at places [ROWS] over keys [G, T, D] and values [G, T, V]: [ROWS, H, V]."""
    top = query.new_full((*query.shape[:2], 1), float("-inf"))
    total, summed = torch.zeros_like(top), query.new_zeros(*query.shape[:2], value.shape[-1])
    heads = len(query)
    for start in range(0, int(place.max()) + 1, SLOTS):
        some, slots = slice(start, start + SLOTS), torch.arange(start, start + SLOTS)
        scores = torch.bmm(query, key[:, some].mT.expand(heads, -1, -1)) * softmax_scale
        scores = scores.masked_fill(slots > place[:, None], float("-inf"))
        best = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink, weights = (top - best).exp(), (scores - best).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        summed = summed * shrink + torch.bmm(weights, value[:, some].expand(heads, -1, -1))
        top = best
    return (summed / total).transpose(0, 1)
