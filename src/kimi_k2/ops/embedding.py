"""Rows of the embedding, and of a rank's part of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
