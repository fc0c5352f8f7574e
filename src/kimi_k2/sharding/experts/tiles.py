"""Experts in FP8 tiles for the NKI kernel, with the checkpoint's block scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_k2.sharding.experts.bf16_tiles import FloatTiles
from kimi_k2.sharding.experts.block_scaled import BlockScaledExperts
from kimi_k2.sharding.experts.format import ExpertFormat, register
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

    @classmethod
    def from_neuron_config(cls, neuron_config: Any) -> Fp8Tiles:
        """With the width that `quantization_block_size` names."""
        return cls(neuron_config.quantization_block_size[1])

    def neuron_options(self) -> dict[str, Any]:
        """Blocks of the rank's width."""
        return self.quantization_options((PARTITIONS, self.width))

    @property
    def shared(self) -> ExpertFormat | None:
        """With the shared expert's width; as the checkpoint has it where that is not FP8."""
        if not self.shared_width:
            return None
        return Fp8Tiles(self.shared_width) if self.shared_fp8 else FloatTiles()

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Gate and up have fewer rows than columns (`check_width`)."""
        return (self.width, PARTITIONS) if rows < columns else (PARTITIONS, self.width)
