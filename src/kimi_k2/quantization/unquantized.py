"""Weights stored as they are, in BF16 (F16 and F32 are read too)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kimi_k2.quantization.stored import Stored, StoredFormat, TensorSpec, register


@register
class UnquantizedFormat(StoredFormat):
    """One BF16 tensor; a checkpoint in this format has no `quantization_config`."""

    name = "bf16"

    def to_hf_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """`weight`."""
        yield TensorSpec(f"{module}.weight", torch.bfloat16, (rows, columns))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The stored weight in `dtype`."""
        return stored["weight"].to(dtype)

    def quantize(self, weight: Tensor) -> Stored:
        """The weight rounded to BF16."""
        return {"weight": weight.to(torch.bfloat16)}
