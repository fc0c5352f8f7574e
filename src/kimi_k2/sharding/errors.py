"""Error of a conversion against the checkpoint's own dequantized weights, exact, summed a layer and in total."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kimi_k2.quantization.fp8_block import block_grid, e4m3_to_float32
from kimi_k2.quantization.neuron_e4m3 import inexact_codes

_LAST_BIT = 2.0**-9  # what rounding half of an odd multiple of 2^-9 and doubling it again is off by


@dataclass
class ConversionError:
    """Sums over values.

    Attributes:
        values: number of values.
        changed: values whose meaning changed.
        squared_error, squared_norm: sums of squares of the difference and of the original.
        max_error: largest absolute difference.
    """

    values: int = 0
    changed: int = 0
    squared_error: float = 0.0
    squared_norm: float = 0.0
    max_error: float = 0.0

    def add(self, other: ConversionError) -> None:
        """Add another part's sums."""
        self.values += other.values
        self.changed += other.changed
        self.squared_error += other.squared_error
        self.squared_norm += other.squared_norm
        self.max_error = max(self.max_error, other.max_error)

    @property
    def relative_l2(self) -> float:
        """Root of squared error over squared norm."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0

    def as_dict(self) -> dict[str, float]:
        """For the manifest."""
        return {**asdict(self), "relative_l2": self.relative_l2}


def compare(original: Tensor, converted: Tensor) -> ConversionError:
    """Error between two float32 tensors of one shape; `converted` is overwritten."""
    difference = converted.sub_(original)
    return ConversionError(
        values=original.numel(),
        changed=int(torch.count_nonzero(difference)),
        squared_error=float(torch.linalg.vector_norm(difference, dtype=torch.float32)) ** 2,
        squared_norm=float(torch.linalg.vector_norm(original, dtype=torch.float32)) ** 2,
        max_error=float(difference.abs_().max()),
    )


def halving_error(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> ConversionError:
    """Error of `halve_codes` for a block-FP8 weight [N, K] with scales [N / rows, K / columns]."""
    grid = block_grid(weight.shape, block)
    padding = (0, grid[1] * block[1] - weight.shape[1], 0, grid[0] * block[0] - weight.shape[0])
    inexact = inexact_codes(weight).view(torch.uint8)
    if any(padding):
        inexact = torch.nn.functional.pad(inexact, padding)
    counts = inexact.view(grid[0], block[0], grid[1], block[1]).sum(dim=(1, 3), dtype=torch.int32)
    plain = e4m3_to_float32(weight).square_()
    if any(padding):
        plain = torch.nn.functional.pad(plain, padding)
    squares = plain.view(grid[0], block[0], grid[1], block[1]).sum(dim=(1, 3))
    wide = scale.to(torch.float64).square()
    worst = scale[counts > 0].abs()
    return ConversionError(
        values=weight.numel(),
        changed=int(counts.sum()),
        squared_error=float((counts * wide).sum()) * _LAST_BIT**2,
        squared_norm=float((squares.to(torch.float64) * wide).sum()),
        max_error=float(worst.max()) * _LAST_BIT if worst.numel() else 0.0,
    )
