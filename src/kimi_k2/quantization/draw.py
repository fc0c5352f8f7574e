"""Random values for synthetic weights, drawn in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_CHUNK = 2**24
# Root mean square of a scale factor uniform over 0.5 to 1.5.
_SPREAD_RMS = math.sqrt(13 / 12)


def filled(count: int, dtype: torch.dtype, draw: Callable[[int], Tensor]) -> Tensor:
    """Draw a flat tensor in chunks, since an intermediate of 4 to 8 bytes a value would dwarf the result."""
    flat = torch.empty(count, dtype=dtype)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        flat[start : start + size] = draw(size)
    return flat


def scale_factors(count: int, std: float, generator: torch.Generator) -> Tensor:
    """float32 [count] scales uniform over a factor of 3, whose root mean square is `std`."""
    return torch.rand(count, generator=generator).add_(0.5).div_(_SPREAD_RMS) * std
