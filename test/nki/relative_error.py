"""Tensors to kernels, and how far a kernel's results are from exact ones."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch


def to_kernel(values: torch.Tensor) -> Any:
    """Trainium's name for e4m3 within 240, where both formats have the same bits; and torch for the rest."""
    if values.dtype == torch.float8_e4m3fn:
        return values.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3)
    return values.contiguous()


def relative(got: Any, wanted: Any) -> float:
    """Relative L2 of a kernel's result, or of a tensor, to a float64 tensor of as many values."""
    found = got if isinstance(got, torch.Tensor) else torch.from_numpy(np.asarray(got, np.float64))
    return float((found.double().reshape(wanted.shape) - wanted).norm() / wanted.norm())
