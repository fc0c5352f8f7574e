"""Experts in FP8 with one float32 scale a square block, for Trainium2's e4m3, whose maximum is 240."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kimi_k2.quantization.fp8_block import block_grid, dequantize_fp8_block, quantize_fp8_block
from kimi_k2.quantization.neuron_e4m3 import halve_blocks
from kimi_k2.quantization.stored import Stored
from kimi_k2.sharding.errors import ConversionError, compare, halving_error
from kimi_k2.sharding.experts.format import ExpertFormat, Matrix, register

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout

# Of a checkpoint without FP8 blocks.
DEFAULT_BLOCK = (128, 128)


@register
@dataclass(frozen=True)
class BlockwiseExperts(ExpertFormat):
    """FP8 values of the checkpoint halved, scales doubled: exact but for the lowest bit of subnormals, at most 224.

    A rank's width may be less than a block of the checkpoint (64 rows at 32 ranks, 32 at 64): scales are then repeated
    for smaller blocks, so that no block crosses a rank's border and gate and up share none.

    Attributes:
        block: side of a scale block.
    """

    block: int

    name = "blockwise"
    quantization_type = "blockwise_symmetric"

    @classmethod
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> BlockwiseExperts:
        """With the largest block that divides the checkpoint's and a rank's share of an expert."""
        held = (config.quantization.e4m3_block if config.quantization else None) or DEFAULT_BLOCK
        return cls(math.gcd(*held, config.moe_intermediate_size // layout.moe_tp))

    @classmethod
    def from_neuron_config(cls, neuron_config: Any) -> BlockwiseExperts:
        """With the block of `quantization_block_size`."""
        return cls(neuron_config.quantization_block_size[0])

    def neuron_options(self) -> dict[str, Any]:
        """NxD's blockwise quantization along input and output."""
        return {
            "quantized": True,
            "quantization_type": self.quantization_type,
            "quantization_dtype": "f8e4m3",
            "quantization_block_axis": [1, 2],
            "quantization_block_size": [self.block, self.block],
        }

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """FP8 values, and a scale a block."""
        grid = block_grid((rows, columns), (self.block, self.block))
        return {"weight": (torch.float8_e4m3fn, (rows, columns)), "scale": (torch.float32, grid)}

    def convert(self, matrix: Matrix, dtype: torch.dtype, error: ConversionError | None) -> Stored:
        """Halved FP8 values and doubled scales; what is not stored in FP8 is quantized with amax / 448 first."""
        square = (self.block, self.block)
        if (held := matrix.source.e4m3_blocks(matrix.stored)) is not None:
            weight, scale = held
            halved, doubled, inexact = halve_blocks(weight, scale, matrix.source.block, self.block, allow_nan=True)
            if error is not None:
                error.add(halving_error(weight, scale, matrix.source.block, inexact))
            return {"weight": halved, "scale": doubled}
        plain = matrix.dequantized(torch.float32)
        halved, doubled, _ = halve_blocks(*quantize_fp8_block(plain, square), square, self.block, allow_nan=True)
        if error is not None:
            error.add(compare(plain, dequantize_fp8_block(halved, doubled, square)))
        return {"weight": halved, "scale": doubled}
