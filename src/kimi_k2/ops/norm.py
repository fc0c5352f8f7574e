"""RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.registry import COMPOSED, operation
from kimi_k2.ops.rows import by_rows, in_blocks


@operation
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, x's dtype and shape kept.

    The statistics are taken in float32 (float64 for float64 input) and the quotient is rounded to the input's dtype
    before the weight is applied, as Hugging Face does.
    """
    if in_blocks(x):
        out: Tensor = by_rows(lambda rows: _normed(rows, weight, eps), x.reshape(-1, x.shape[-1]))
        return out.view(x.shape)
    return _normed(x, weight, eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@operation(batch_invariant=COMPOSED)
def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual sum and the norm after it: x + delta and its `rms_norm`, both [T, H]."""
    total = x + delta
    return total, rms_norm(total, weight, eps)
