"""The embedding of tokens."""

from __future__ import annotations

from torch import Tensor, nn

from kimi_k2.ops.embedding import embedding


class Embedding(nn.Module):
    """`ops.embedding.embedding` with its weight [V, H]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [B, S] to [B, S, H]."""
        return embedding(input_ids, self.weight)
