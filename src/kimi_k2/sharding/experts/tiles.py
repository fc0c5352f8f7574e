"""Routed experts in tiles for the NKI kernel, of which every partition of SBUF reads one long run: FP8 and floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts.bf16 import FloatExperts
from kimi_k2.sharding.experts.blockwise import BlockScaledExperts
from kimi_k2.sharding.experts.format import ExpertFormat, input_first, register

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout

PARTITIONS = 128
# A rank's columns of an expert that `kimi_k2.nki.kernels.experts` takes: gate and up together fill its partitions.
WIDTHS = (32, 64)


def shared_width(config: KimiK2Config, layout: Layout) -> int:
    """A rank's columns of the shared expert, which all ranks divide; 0 where the kernel does not take so many."""
    width = config.moe_intermediate_size * config.n_shared_experts // layout.ranks
    return width if width in WIDTHS else 0


def check_width(config: KimiK2Config, layout: Layout) -> int:
    """A rank's columns of an expert.

    Raises:
        ConfigError: the kernel does not take so many, or the hidden size is not a multiple of 128, or not the larger.
    """
    width = config.moe_intermediate_size // layout.moe_tp
    if width not in WIDTHS:
        expected = " or ".join(map(str, WIDTHS))
        raise ConfigError(
            f"tiles hold {expected} columns of an expert a rank, got {width} with {layout.moe_tp} ranks an expert",
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
            return torch.cat([one.unflatten(0, (parts, -1)) for one in (gate, up)], dim=1)
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
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> FloatTiles:
        """With the shared expert's width; the kernel takes some sizes alone.

        Raises:
            ConfigError: see `check_width`.
        """
        check_width(config, layout)
        return cls(shared_width(config, layout))

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
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> Fp8Tiles:
        """With a rank's width.

        Raises:
            ConfigError: see `check_width`.
        """
        in_blocks = config.format_of_experts("shared_experts.gate_proj").e4m3_block is not None
        return cls(check_width(config, layout), shared_width(config, layout), in_blocks)

    @property
    def shared(self) -> ExpertFormat | None:
        """With the shared expert's width; as the checkpoint has it where that is not FP8."""
        if not self.shared_width:
            return None
        return Fp8Tiles(self.shared_width) if self.shared_fp8 else FloatTiles()

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Gate and up have fewer rows than columns (`check_width`)."""
        return (self.width, PARTITIONS) if rows < columns else (PARTITIONS, self.width)
