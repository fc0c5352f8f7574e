"""Error of a conversion against the checkpoint's own dequantized weights, exact, summed a layer and in total."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kimi_k2.quantization.fp8_block import dequantized_chunks

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
    difference, before = converted.sub_(original).reshape(-1), original.reshape(-1)
    low, high = difference.aminmax()
    return ConversionError(
        values=original.numel(),
        # As integers they are counted several times faster; zero has no bit set, as -0 is no difference of two numbers.
        changed=int(np.count_nonzero(difference.view(torch.int32).numpy())),
        squared_error=float(difference.dot(difference)),
        squared_norm=float(before.dot(before)),
        max_error=max(-float(low), float(high)),
    )


def halving_error(
    weight: Tensor, scale: Tensor, block: tuple[int, int], places: npt.NDArray[np.int64]
) -> ConversionError:
    """Error of `halve_blocks` for a block-FP8 weight [N, K] with scales [N / rows, K / columns].

    Args:
        weight: float8_e4m3fn, before it was halved.
        scale: float32, before it was doubled.
        block: rows and columns that share a scale.
        places: where in the flattened weight it rounds.
    """
    columns = weight.shape[1]
    worst = scale.abs().numpy()[places // columns // block[0], places % columns // block[1]].astype(np.float64)
    squared_norm = 0.0
    for _, plain in dequantized_chunks(weight, scale, block):
        flat = plain.reshape(-1)
        squared_norm += float(flat.dot(flat))
    return ConversionError(
        values=weight.numel(),
        changed=len(places),
        squared_error=float(np.square(worst).sum()) * _LAST_BIT**2,
        squared_norm=squared_norm,
        max_error=float(worst.max()) * _LAST_BIT if len(worst) else 0.0,
    )
