"""Experts in FP8 tiles for the NKI kernel, with the checkpoint's block scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kimi_k2.quantization.fp8_block import block_grid, dequantize_fp8_block, quantize_fp8_block
from kimi_k2.quantization.neuron_e4m3 import halve_blocks
from kimi_k2.quantization.stored import Stored
from kimi_k2.sharding.errors import ConversionError, compare, halving_error
from kimi_k2.sharding.experts.format import Matrix, register
from kimi_k2.sharding.experts.tiled import PARTITIONS, TiledExperts, check_width

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout


@register
@dataclass(frozen=True)
class Fp8Tiles(TiledExperts):
    """FP8 values of the checkpoint halved, scales doubled, as in `blockwise`; a scale for 128 hidden values.

    Along the expert's width a block is a rank's part, whose scale is that of the checkpoint's block around it.

    Attributes:
        width: a rank's columns of an expert.
    """

    width: int

    name = "tiles"
    quantization_type = "blockwise_symmetric"

    @classmethod
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> Fp8Tiles:
        """With a rank's width.

        Raises:
            ConfigError: see `check_width`.
        """
        return cls(check_width(config, layout))

    @classmethod
    def from_neuron_config(cls, neuron_config: Any) -> Fp8Tiles:
        """With the width that `quantization_block_size` names."""
        return cls(neuron_config.quantization_block_size[1])

    def neuron_options(self) -> dict[str, Any]:
        """Blocks along input and output of gate and up."""
        return {
            "expert_tiles": True,
            "quantized": True,
            "quantization_type": self.quantization_type,
            "quantization_dtype": "f8e4m3",
            "quantization_block_axis": [1, 2],
            "quantization_block_size": [PARTITIONS, self.width],
        }

    def _block(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of a block; gate and up have fewer rows than columns (`check_width`)."""
        return (self.width, PARTITIONS) if rows < columns else (PARTITIONS, self.width)

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """FP8 values, and a scale a block."""
        grid = block_grid((rows, columns), self._block(rows, columns))
        return {"weight": (torch.float8_e4m3fn, (rows, columns)), "scale": (torch.float32, grid)}

    def convert(self, matrix: Matrix, dtype: torch.dtype, error: ConversionError | None) -> Stored:
        """Halved FP8 values and doubled scales; what is stored otherwise is quantized with amax / 448 first."""
        block = self._block(matrix.rows, matrix.columns)
        held = matrix.source.e4m3_blocks(matrix.stored)
        if held is not None and all(size % side == 0 for size, side in zip(matrix.source.block, block, strict=True)):
            weight, scale = held
            halved, doubled, inexact = halve_blocks(weight, scale, matrix.source.block, block, allow_nan=True)
            if error is not None:
                error.add(halving_error(weight, scale, matrix.source.block, inexact))
            return {"weight": halved, "scale": doubled}
        plain = matrix.dequantized(torch.float32)
        halved, doubled, _ = halve_blocks(*quantize_fp8_block(plain, block), block, block, allow_nan=True)
        if error is not None:
            error.add(compare(plain, dequantize_fp8_block(halved, doubled, block)))
        return {"weight": halved, "scale": doubled}
