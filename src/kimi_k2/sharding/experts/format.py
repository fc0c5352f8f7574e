"""What a format of routed experts on Neuron is: a subclass of `ExpertFormat` in a file of its own.

It registers itself; all modules of this package are searched for formats when the first is asked for. What it
requantizes is measured: `ConversionError`, against the checkpoint's own dequantized weights, exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kimi_k2.quantization.fp8_block import dequantized_chunks
from kimi_k2.quantization.rows import new_matrix
from kimi_k2.quantization.stored import Registry, Stored, StoredFormat

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout

_ROWS = 32
_TILE = 2**19  # bytes that are transposed at a time: twice as many fit a core's cache


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


class Matrix(NamedTuple):
    """One projection of one expert as the checkpoint stores it: tensors by suffix, their format, the weight's shape."""

    stored: Stored
    source: StoredFormat
    rows: int
    columns: int

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns]."""
        return self.source.dequantize(self.stored, dtype)


class ExpertFormat(ABC):
    """How NxD holds the routed experts' matrices: tensors by suffix, each with [output, input] as last dimensions.

    Attributes:
        name: the project's name, as in `convert --experts`.
        quantization_type: NxD's name, an option of MoENeuronConfig; None for float weights.
        tiles: for the NKI kernels (`Layout.decode`): gate and up are held in their tiles.
        shared: the format of the shared expert, where it lies in tiles too, a stack of one that all ranks divide; None
            where it is three linears.
    """

    name: ClassVar[str]
    quantization_type: ClassVar[str | None] = None
    tiles: ClassVar[bool] = False

    @property
    def shared(self) -> ExpertFormat | None:
        """See the class."""
        return None

    @classmethod
    @abstractmethod
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> ExpertFormat:
        """The format with what depends on sizes and ranks."""

    @classmethod
    def neuron_options(cls) -> dict[str, Any]:
        """Arguments of KimiK2NeuronConfig; all else depends on sizes, which that knows."""
        quantized = cls.quantization_type is not None
        return {"quantized": True, "quantization_type": cls.quantization_type} if quantized else {}

    @abstractmethod
    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """Dtype and shape by suffix for a [rows, columns] weight of a model in `dtype`; a last size of 1 is not cut."""

    @abstractmethod
    def convert(self, matrix: Matrix, dtype: torch.dtype, error: ConversionError | None) -> Stored:
        """Tensors by suffix; what is requantized adds its error to `error`."""

    def dequantized(self, stored: Stored, rows: int, columns: int) -> Tensor:
        """The float32 weight [rows, columns] that `convert` stored; for formats in tiles."""
        return stored["weight"].to(torch.float32)

    def fused_shape(self, suffix: str, rows: int, columns: int) -> tuple[tuple[int, ...], int]:
        """Shape of one expert's gate and up as one tensor, each [rows, columns], and its dimension that ranks cut.

        A rank has its part of gate, and after it that of up.
        """
        return (columns, 2 * rows), 1

    def fuse(self, suffix: str, gate: Tensor, up: Tensor, *, parts: int) -> Tensor:
        """One expert's gate and up [rows, columns] in `fused_shape`, of each of `parts` ranks, contiguous."""
        return input_first(gate, up, parts=parts)


_REGISTRY: Registry[ExpertFormat] = Registry("kimi_k2.sharding.experts")
register = _REGISTRY.register


def expert_formats() -> Mapping[str, type[ExpertFormat]]:
    """All known formats by name."""
    return _REGISTRY.known()


def format_held(quantization_type: str | None, *, tiles: bool) -> str:
    """Name of the format with NxD's name of its quantization, None for floats, in tiles or not."""
    return next(
        one.name
        for one in expert_formats().values()
        if (one.quantization_type, one.tiles) == (quantization_type, tiles)
    )


def without_tiles(name: str) -> str:
    """The format that holds the same without tiles, for a decode step of PyTorch operations."""
    return format_held(expert_formats()[name].quantization_type, tiles=False)


def input_first(*matrices: Tensor, parts: int = 1) -> Tensor:
    """[N, K] matrices of one shape to [parts, K, columns]: of each matrix a part's columns, side by side.

    As fast as the memory, since it is most of a conversion's work.
    """
    dtype = matrices[0].dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    rows, columns = matrices[0].shape
    width = rows // parts
    out = new_matrix((parts, columns, width * len(matrices)), dtype)
    if dtype.itemsize == 1:
        _bytes_input_first([matrix.view(torch.uint8) for matrix in matrices], out.view(torch.uint8))
        return out
    target = out.view(bits).numpy()
    for place, matrix in enumerate(matrices):
        source = matrix.contiguous().view(bits).numpy().reshape(parts, width, columns)
        # A few rows at a time, so that each cache line is read and written once; torch walks the whole matrix.
        for first in range(0, width, _ROWS):
            some = source[:, first : first + _ROWS]
            column = place * width + first
            target[:, :, column : column + some.shape[1]] = some.transpose(0, 2, 1)
    return out


def _bytes_input_first(matrices: list[Tensor], out: Tensor) -> None:
    """`input_first` of uint8, into `out`."""
    parts, columns, together = out.shape
    rows = together // len(matrices)
    for part in range(parts):
        slices = [matrix[part * rows : (part + 1) * rows] for matrix in matrices]
        if together * columns <= _TILE:
            out[part] = _transposed(torch.cat(slices))
            continue
        step = max(1, _TILE // columns)
        for place, matrix in enumerate(slices):
            for first in range(0, rows, step):
                tile = _transposed(matrix[first : first + step].contiguous())
                column = place * rows + first
                out[part, :, column : column + tile.shape[1]] = tile


def _transposed(tile: Tensor) -> Tensor:
    """A contiguous uint8 [N, K] as [K, N].

    Of all that torch and NumPy offer, the shuffle of channels alone transposes bytes with vector instructions: N groups
    of K channels, the channels last, become K groups of N.
    """
    rows, columns = tile.shape
    size = rows * columns
    pixel = tile.view(-1).as_strided((1, size, 1, 1), (size, 1, size, size))
    return torch.native_channel_shuffle(pixel, rows).view(columns, rows)
