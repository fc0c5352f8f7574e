"""Experts in FP8 with one float32 scale a square block, for Trainium2's e4m3, whose maximum is 240."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_k2.sharding.experts.block_scaled import BlockScaledExperts
from kimi_k2.sharding.experts.format import register

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout

# Of a checkpoint without FP8 blocks.
DEFAULT_BLOCK = (128, 128)


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
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> BlockwiseExperts:
        """With the largest block that divides the checkpoint's and a rank's share of an expert."""
        held = config.format_of_experts().e4m3_block or DEFAULT_BLOCK
        return cls(math.gcd(*held, config.moe_intermediate_size // layout.moe_tp))

    @classmethod
    def from_neuron_config(cls, neuron_config: Any) -> BlockwiseExperts:
        """With the block of `quantization_block_size`."""
        return cls(neuron_config.quantization_block_size[0])

    def neuron_options(self) -> dict[str, Any]:
        """Square blocks."""
        return self.quantization_options((self.block, self.block))

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """The same of every weight."""
        return self.block, self.block
