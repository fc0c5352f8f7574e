"""Experts in FP8 tiles for the NKI kernel, with the checkpoint's block scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_k2.sharding.experts.block_scaled import BlockScaledExperts
from kimi_k2.sharding.experts.format import register
from kimi_k2.sharding.experts.tiled import PARTITIONS, TiledExperts, check_width, shared_width

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout


@register
@dataclass(frozen=True)
class Fp8Tiles(TiledExperts, BlockScaledExperts):
    """FP8 values of the checkpoint halved, scales doubled, as in `blockwise`; a scale for 128 hidden values.

    Along the expert's width a block is a rank's part, whose scale is that of the checkpoint's block around it.

    Attributes:
        width: a rank's columns of an expert.
        shared_width: of the shared expert; 0 where that is not in tiles: the checkpoint has no FP8 blocks of it, or the
            kernel does not take its width.
    """

    width: int
    shared_width: int = 0

    name = "tiles"

    @classmethod
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> Fp8Tiles:
        """With a rank's width.

        Raises:
            ConfigError: see `check_width`.
        """
        in_blocks = config.format_of_experts("shared_experts.gate_proj").e4m3_block is not None
        return cls(check_width(config, layout), shared_width(config, layout) if in_blocks else 0)

    @classmethod
    def from_neuron_config(cls, neuron_config: Any) -> Fp8Tiles:
        """With the width that `quantization_block_size` names."""
        return cls(neuron_config.quantization_block_size[1])

    def neuron_options(self) -> dict[str, Any]:
        """Blocks of the rank's width."""
        return self.quantization_options((PARTITIONS, self.width))

    @property
    def shared(self) -> Fp8Tiles | None:
        """With the shared expert's width."""
        return Fp8Tiles(self.shared_width) if self.shared_width else None

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Gate and up have fewer rows than columns (`check_width`)."""
        return (self.width, PARTITIONS) if rows < columns else (PARTITIONS, self.width)
