"""Experts in the model's own float type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kimi_k2.quantization.stored import Stored
from kimi_k2.sharding.experts.format import ConversionError, ExpertFormat, Matrix, register

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout


@register
@dataclass(frozen=True)
class FloatExperts(ExpertFormat):
    """Dequantized weights in the model's dtype."""

    name = "bf16"

    @classmethod
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> FloatExperts:
        """Nothing depends on sizes."""
        return cls()

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """`weight`."""
        return {"weight": (dtype, (rows, columns))}

    def convert(self, matrix: Matrix, dtype: torch.dtype, error: ConversionError | None) -> Stored:
        """The dequantized weight; its rounding is the model's, not the conversion's."""
        return {"weight": matrix.dequantized(dtype)}
