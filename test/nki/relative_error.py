"""How far a kernel's results are from exact ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def relative(got: Any, wanted: Any) -> float:
    """Relative L2 of a kernel's result, or of a tensor, to a float64 tensor of as many values."""
    found = got if isinstance(got, torch.Tensor) else torch.from_numpy(np.asarray(got, np.float64))
    return float((found.double().reshape(wanted.shape) - wanted).norm() / wanted.norm())
