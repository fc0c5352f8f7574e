"""Tiles of the routed experts' weights for the NKI kernel: every partition of SBUF reads one long run."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts.format import ExpertFormat, input_first

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
