"""How NxD holds routed experts on Neuron: each form a subclass of `ExpertFormat`, known by its name.

What a form requantizes is measured: `ConversionError`, against the checkpoint's own dequantized weights, exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.fp8_block import (
    block_grid,
    dequantize_fp8_block,
    dequantized_chunks,
    quantize_fp8_block,
    scaled_e4m3_rows,
)
from kimi_k2.quantization.neuron_e4m3 import halve_blocks, quantize_chunks
from kimi_k2.quantization.rows import new_matrix
from kimi_k2.quantization.stored import Stored, StoredFormat

PARTITIONS = 128
# A rank's columns of an expert that `kimi_k2.nki.kernels.experts` takes: gate and up together fill its partitions.
WIDTHS = (32, 64)
DEFAULT_BLOCK = (128, 128)  # of a checkpoint without FP8 blocks
_SCRATCH = 3  # 0 to 2 are in use while rows are quantized
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
    def for_ranks(cls, config: KimiK2Config, moe_tp: int, ranks: int) -> ExpertFormat:
        """The format with what depends on sizes, the ranks that share an expert, and all ranks."""
        return cls()

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


_FORMATS: dict[str, type[ExpertFormat]] = {}


def register(cls: type[ExpertFormat]) -> type[ExpertFormat]:
    """Class decorator: known by the class's `name`."""
    _FORMATS[cls.name] = cls
    return cls


def expert_formats() -> Mapping[str, type[ExpertFormat]]:
    """All known formats by name."""
    return _FORMATS


def format_held(quantization_type: str | None, *, tiles: bool) -> str:
    """Name of the format with NxD's name of its quantization, None for floats, in tiles or not."""
    return next(
        format_.name
        for format_ in expert_formats().values()
        if (format_.quantization_type, format_.tiles) == (quantization_type, tiles)
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
    for number, matrix in enumerate(matrices):
        source = matrix.contiguous().view(bits).numpy().reshape(parts, width, columns)
        # A few rows at a time, so that each cache line is read and written once; torch walks the whole matrix.
        for first in range(0, width, _ROWS):
            some = source[:, first : first + _ROWS]
            column = number * width + first
            target[:, :, column : column + some.shape[1]] = some.transpose(0, 2, 1)
    return out


def _bytes_input_first(matrices: list[Tensor], out: Tensor) -> None:
    """`input_first` of uint8, into `out`."""
    parts, columns, together = out.shape
    rows = together // len(matrices)
    for rank in range(parts):
        slices = [matrix[rank * rows : (rank + 1) * rows] for matrix in matrices]
        if together * columns <= _TILE:
            out[rank] = _transposed(torch.cat(slices))
            continue
        step = max(1, _TILE // columns)
        for number, matrix in enumerate(slices):
            for first in range(0, rows, step):
                tile = _transposed(matrix[first : first + step].contiguous())
                column = number * rows + first
                out[rank, :, column : column + tile.shape[1]] = tile


def _transposed(tile: Tensor) -> Tensor:
    """A contiguous uint8 [N, K] as [K, N].

    Of all that torch and NumPy offer, the shuffle of channels alone transposes bytes with vector instructions: N groups
    of K channels, the channels last, become K groups of N.
    """
    rows, columns = tile.shape
    size = rows * columns
    pixel = tile.view(-1).as_strided((1, size, 1, 1), (size, 1, size, size))
    return torch.native_channel_shuffle(pixel, rows).view(columns, rows)


@register
@dataclass(frozen=True)
class FloatExperts(ExpertFormat):
    """Dequantized weights in the model's dtype."""

    name = "bf16"

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """`weight`."""
        return {"weight": (dtype, (rows, columns))}

    def convert(self, matrix: Matrix, dtype: torch.dtype, error: ConversionError | None) -> Stored:
        """The dequantized weight; its rounding is the model's, not the conversion's."""
        return {"weight": matrix.dequantized(dtype)}


class BlockScaledExperts(ExpertFormat):
    """What formats with block scales share; each says what its blocks are."""

    quantization_type = "blockwise_symmetric"

    @abstractmethod
    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of a block of a [rows, columns] weight."""

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """FP8 values, and a scale a block."""
        grid = block_grid((rows, columns), self.block_of(rows, columns))
        return {"weight": (torch.float8_e4m3fn, (rows, columns)), "scale": (torch.float32, grid)}

    def dequantized(self, stored: Stored, rows: int, columns: int) -> Tensor:
        """Values times scales."""
        return dequantize_fp8_block(stored["weight"], stored["scale"], self.block_of(rows, columns))

    def convert(self, matrix: Matrix, dtype: torch.dtype, error: ConversionError | None) -> Stored:
        """Halved FP8 values and doubled scales; what is stored otherwise is quantized with amax / 448 first."""
        block = self.block_of(matrix.rows, matrix.columns)
        e4m3 = matrix.source.e4m3_blocks(matrix.stored)
        if e4m3 is not None and all(size % side == 0 for size, side in zip(matrix.source.block, block, strict=True)):
            weight, scale = e4m3
            halved, doubled, inexact = halve_blocks(weight, scale, matrix.source.block, block)
            if error is not None:
                error.add(halving_error(weight, scale, matrix.source.block, inexact))
            return {"weight": halved, "scale": doubled}
        plain = matrix.dequantized(torch.float32)
        halved, doubled, _ = halve_blocks(*quantize_fp8_block(plain, block), block, block)
        if error is not None:
            error.add(compare(plain, dequantize_fp8_block(halved, doubled, block)))
        return {"weight": halved, "scale": doubled}


@register
@dataclass(frozen=True)
class BlockwiseExperts(BlockScaledExperts):
    """FP8 values of the checkpoint halved, scales doubled: exact but for the lowest bit of subnormals, at most 224.

    A rank's width may be less than a block of the checkpoint (64 rows at 32 ranks, 32 at 64): scales are then repeated
    for smaller blocks, so that no block crosses a rank's border and gate and up share none.

    Attributes:
        block: side of a scale block.
    """

    block: int

    name = "blockwise"

    @classmethod
    def for_ranks(cls, config: KimiK2Config, moe_tp: int, ranks: int) -> BlockwiseExperts:
        """With the largest block that divides the checkpoint's, the hidden size and a rank's share of an expert."""
        stored_block = config.format_of_experts().e4m3_block or DEFAULT_BLOCK
        return cls(math.gcd(*stored_block, config.hidden_size, config.moe_intermediate_size // moe_tp))

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """The same of every weight."""
        return self.block, self.block


@register
@dataclass(frozen=True)
class ChannelExperts(ExpertFormat):
    """Requantized with amax / 240 a channel; the error is about 2.6 % of the weights."""

    name = "per_channel"
    quantization_type = "expert_wise_per_channel_symmetric"

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """FP8 values, and a scale a row."""
        return {"weight": (torch.float8_e4m3fn, (rows, columns)), "scale": (torch.float32, (rows, 1))}

    def convert(self, matrix: Matrix, dtype: torch.dtype, error: ConversionError | None) -> Stored:
        """Some rows at a time, without ever holding the dequantized weight whole."""

        def observe(plain: Tensor, values: Tensor, scale: Tensor) -> None:
            if error is not None:
                error.add(compare(plain, scaled_e4m3_rows(values, scale, _SCRATCH)))

        rows = matrix.source.dequantized_rows(matrix.stored)
        shape = torch.Size((matrix.rows, matrix.columns))
        values, scale = quantize_chunks(shape, rows, None if error is None else observe)
        return {"weight": values, "scale": scale}


def shared_width(config: KimiK2Config, ranks: int) -> int:
    """A rank's columns of the shared expert, which all ranks divide; 0 where the kernel does not take so many."""
    width = config.moe_intermediate_size * config.n_shared_experts // ranks
    return width if width in WIDTHS else 0


def check_width(config: KimiK2Config, moe_tp: int) -> int:
    """A rank's columns of an expert.

    Raises:
        ConfigError: the kernel does not take so many, or the hidden size is not a multiple of 128, or not the larger.
    """
    width = config.moe_intermediate_size // moe_tp
    if width not in WIDTHS:
        expected = " or ".join(map(str, WIDTHS))
        raise ConfigError(
            f"tiles hold {expected} columns of an expert a rank, got {width} with {moe_tp} ranks an expert",
            field="moe_intermediate_size",
        )
    if config.hidden_size % PARTITIONS or config.hidden_size <= config.moe_intermediate_size:
        expected = f"a multiple of {PARTITIONS} above moe_intermediate_size ({config.moe_intermediate_size})"
        raise ConfigError(f"tiles need {expected}, got {config.hidden_size}", field="hidden_size")
    return width


class TiledExperts(ExpertFormat):
    """Gate and up [E, 128, H/128, 2 I]: [e, p, c, j] is row j of gate (of up from I on), column c * 128 + p.

    Scales of gate and up are [E, 2, H/128] on a rank, of down [E, 1, H/128]; down is [E, I, H] as in other formats.
    """

    tiles: ClassVar[bool] = True

    def fused_shape(self, suffix: str, rows: int, columns: int) -> tuple[tuple[int, ...], int]:
        """Tiles, cut along their last dimension; scales with the ranks' blocks of rows first."""
        if suffix == "weight":
            return (PARTITIONS, columns // PARTITIONS, 2 * rows), 2
        return (2 * rows, columns), 0

    def fuse(self, suffix: str, gate: Tensor, up: Tensor, *, parts: int) -> Tensor:
        """The parts' tiles."""
        if suffix != "weight":
            return torch.cat([scale.unflatten(0, (parts, -1)) for scale in (gate, up)], dim=1)
        whole = input_first(gate, up, parts=parts)
        bits: Tensor = whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[whole.dtype.itemsize])
        tiles: Tensor = bits.unflatten(1, (-1, PARTITIONS)).transpose(1, 2).contiguous()
        return tiles.view(whole.dtype)


@register
@dataclass(frozen=True)
class FloatTiles(TiledExperts, FloatExperts):
    """Dequantized weights in the model's dtype.

    Attributes:
        shared_width: a rank's columns of the shared expert; 0 where the kernel does not take so many.
    """

    shared_width: int = 0

    name = "bf16_tiles"

    @classmethod
    def for_ranks(cls, config: KimiK2Config, moe_tp: int, ranks: int) -> FloatTiles:
        """With the shared expert's width; the kernel takes some sizes alone.

        Raises:
            ConfigError: see `check_width`.
        """
        check_width(config, moe_tp)
        return cls(shared_width(config, ranks))

    @property
    def shared(self) -> FloatTiles | None:
        """The same."""
        return FloatTiles() if self.shared_width else None


@register
@dataclass(frozen=True)
class Fp8Tiles(TiledExperts, BlockScaledExperts):
    """FP8 values of the checkpoint halved, scales doubled, as in `blockwise`; a scale for 128 hidden values.

    Along the expert's width a block is a rank's part, whose scale is that of the checkpoint's block around it.

    Attributes:
        width: a rank's columns of an expert.
        shared_width: of the shared expert; 0 where that is not in tiles: the kernel does not take its width.
        shared_fp8: whether the checkpoint has FP8 blocks of the shared expert; else its tiles are float.
    """

    width: int
    shared_width: int = 0
    shared_fp8: bool = True

    name = "tiles"

    @classmethod
    def for_ranks(cls, config: KimiK2Config, moe_tp: int, ranks: int) -> Fp8Tiles:
        """With a rank's width.

        Raises:
            ConfigError: see `check_width`.
        """
        in_blocks = config.format_of_experts("shared_experts.gate_proj").e4m3_block is not None
        return cls(check_width(config, moe_tp), shared_width(config, ranks), in_blocks)

    @property
    def shared(self) -> ExpertFormat | None:
        """With the shared expert's width; as the checkpoint has it where that is not FP8."""
        if not self.shared_width:
            return None
        return Fp8Tiles(self.shared_width) if self.shared_fp8 else FloatTiles()

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Gate and up have fewer rows than columns (`check_width`)."""
        return (self.width, PARTITIONS) if rows < columns else (PARTITIONS, self.width)
