"""RMSNorm with its weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k2.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """`ops.norm.rms_norm` with its weight."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size], dtype kept."""
        return rms_norm(x, self.weight, self.eps)
