"""Rows of the embedding, and of a rank's part of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.ops.registry import operation


@operation
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
