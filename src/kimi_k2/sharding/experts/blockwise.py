"""Experts in FP8 with a float32 scale a block: values halved for Trainium2's e4m3, scales doubled."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimi_k2.quantization.fp8_block import block_grid, dequantize_fp8_block, quantize_fp8_block
from kimi_k2.quantization.neuron_e4m3 import halve_blocks
from kimi_k2.quantization.stored import Stored
from kimi_k2.sharding.experts.format import ConversionError, ExpertFormat, Matrix, compare, halving_error, register

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout


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
        """With the largest block that divides the checkpoint's, the hidden size and a rank's share of an expert."""
        stored_block = config.format_of_experts().e4m3_block or DEFAULT_BLOCK
        return cls(math.gcd(*stored_block, config.hidden_size, config.moe_intermediate_size // layout.moe_tp))

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """The same of every weight."""
        return self.block, self.block
