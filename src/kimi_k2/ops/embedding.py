"""Embeddings: of tokens, also a rank's part of them, and of positions.

Rotary position embedding (Su et al. 2021, arXiv 2104.09864), applied to interleaved pairs.

The checkpoint lays rotary dimensions out interleaved: pair i is elements (2i, 2i + 1). They stay that way here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.ops.linear import by_rows, in_blocks
from kimi_k2.ops.registry import ELEMENTWISE, operation


@operation(batch_invariant=ELEMENTWISE)
def embedding(input_ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """Rows of tokens.

    Args:
        input_ids: int64 [...].
        weight: [V, H]; with `first` the rows first .. first + V - 1 of a larger one.
        first: None if `weight` is whole.

    Returns:
        [..., H]; zeros for tokens whose row is not held.
    """
    if first is None:
        return F.embedding(input_ids, weight)
    local = input_ids - first
    here = (local >= 0) & (local < weight.shape[0])
    return F.embedding(torch.where(here, local, 0), weight) * here.unsqueeze(-1)


def place_embeddings(x: Tensor, index: Tensor, features: Tensor) -> Tensor:
    """Rows of images and videos in the place of their tokens' own.

    Args:
        x: [B, S, H], embeddings of the tokens.
        index: int64 [B, S], the row of `features` that a token stands for; negative for text.
        features: [M, H].

    Returns:
        [B, S, H] in x's dtype.
    """
    rows = features.to(x.dtype)[index.clamp(min=0)]
    return torch.where((index >= 0).unsqueeze(-1), rows, x)


@operation(batch_invariant=ELEMENTWISE)
def rotary_cos_sin(positions: Tensor, inv_freq: Tensor, multiplier: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every pair's angle.

    Args:
        positions: integers [...].
        inv_freq: float32 [D / 2], radians a position.
        multiplier: of both results (YaRN's attention factor).
        dtype: of the results; angles are float32.

    Returns:
        Two of [..., D / 2].
    """

    def of(places: Tensor) -> tuple[Tensor, Tensor]:
        angles = places.unsqueeze(-1).to(torch.float32) * inv_freq
        return (angles.cos() * multiplier).to(dtype), (angles.sin() * multiplier).to(dtype)

    if in_blocks(positions):
        cos, sin = by_rows(of, positions.flatten())
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)
    return of(positions)


@operation(batch_invariant=ELEMENTWISE)
def apply_rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i + 1) of the last dimension by its angle.

    Args:
        x: [..., D] with D even.
        cos, sin: broadcastable to [..., D / 2].

    Returns:
        [..., D], the layout still interleaved.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
