"""A stored format in one file: int8 values with one float32 scale a row, as a newcomer would add it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from kimi_k2.quantization.stored import Shape, Stored, StoredFormat, register


@register
class RowInt8Format(StoredFormat):
    """`weight` int8 [rows, columns] and `weight_row_scale` float32 [rows, 1]."""

    name = "toy-int8"
    method = "toy-int8"
    suffixes = ("weight", "weight_row_scale")
    scales = ("weight_row_scale",)

    quant_method: Literal["toy-int8"] = "toy-int8"

    @classmethod
    def parse(cls, raw: Mapping[str, Any], field: str) -> RowInt8Format:
        return cls.model_validate(raw)

    def to_hf_dict(self) -> dict[str, Any]:
        return self.model_dump()

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        return (torch.int8, (rows, columns)), (torch.float32, (rows, 1))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        return (stored["weight"].to(torch.float32) * stored["weight_row_scale"]).to(dtype)

    def quantize(self, weight: Tensor) -> Stored:
        scale = weight.abs().amax(dim=-1, keepdim=True) / 127
        return {"weight": (weight / scale).round().to(torch.int8), "weight_row_scale": scale}
