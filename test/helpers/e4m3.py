"""FP8 values as kernels take them, and what rounding a GEMM's tokens to them costs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import torch
from torch import Tensor


def to_kernel(values: Tensor) -> Any:
    """Trainium's name for e4m3 within 240, where both formats have the same bits; and torch for the rest."""
    if values.dtype == torch.float8_e4m3fn:
        return values.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3)
    return values.contiguous()


def rounded(x: Tensor) -> Tensor:
    """x [..., K] to e4m3 and back by groups of 128 of a row, scale = amax / 448: float64."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    back: Tensor = ((groups / scale).to(torch.float8_e4m3fn).double() * scale.double()).flatten(-2)
    return back
