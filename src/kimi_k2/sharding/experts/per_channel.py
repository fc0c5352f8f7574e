"""Experts in FP8 with one float32 scale an output channel of each expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimi_k2.quantization.fp8_block import scaled_e4m3_rows
from kimi_k2.quantization.neuron_e4m3 import quantize_chunks
from kimi_k2.quantization.stored import Stored
from kimi_k2.sharding.experts.format import ConversionError, ExpertFormat, Matrix, compare, register

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout


_SCRATCH = 3  # 0 to 2 are in use while rows are quantized


@register
@dataclass(frozen=True)
class ChannelExperts(ExpertFormat):
    """Requantized with amax / 240 a channel; the error is about 2.6 % of the weights."""

    name = "per_channel"
    quantization_type = "expert_wise_per_channel_symmetric"

    @classmethod
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> ChannelExperts:
        """Nothing depends on sizes."""
        return cls()

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
