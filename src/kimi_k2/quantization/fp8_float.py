"""FP8 e4m3 weights as compressed-tensors stores them (`float-quantized`): one scale, one a channel or one a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kimi_k2.quantization.compressed_tensors import CompressedFormat
from kimi_k2.quantization.fp8_block import Fp8BlockFormat, block_grid, e4m3_to_float32, quantize_fp8_block
from kimi_k2.quantization.stored import BlockSide, RecastFormat, Shape, Stored, StoredFormat, register

# Rows and columns that share a scale, and the shape of `weight_scale`.
Scaling = tuple[tuple[int, int], tuple[int, ...]]


class Fp8Format(StoredFormat, ABC):
    """`weight` e4m3 [rows, columns] and float32 `weight_scale`; held with a scale a row, or as DeepSeek's blocks.

    Activations stay as they are: static scales of them are left out.
    """

    suffixes = ("weight", "weight_scale")
    scales = ("weight_scale",)
    unused = ("input_scale",)

    @abstractmethod
    def scaled(self, rows: int, columns: int) -> Scaling:
        """Which values share a scale."""

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Values and scales."""
        return (torch.float8_e4m3fn, (rows, columns)), (torch.float32, self.scaled(rows, columns)[1])

    def hold(self, stored: Stored) -> Stored:
        """In the other form; what has it is given back."""
        values, scale, name = stored["weight"], stored.get("weight_scale"), self.held_as.suffixes[1]
        if scale is None or (name == "weight_scale" and scale.dim() > 1):
            return stored
        scale = scale.to(torch.float32)
        if name == "weight_scale":
            return {"weight": values, name: scale.reshape(-1, 1).expand(len(values), 1).contiguous()}
        return {"weight": values, name: scale.reshape(len(scale), -1)}

    def quantize(self, weight: Tensor) -> Stored:
        """With scale = amax / 448, 1 for zeros."""
        block, shape = self.scaled(*weight.shape)
        values, scale = quantize_fp8_block(weight, block)
        return {"weight": values, "weight_scale": scale.reshape(shape)}


class _FloatQuantized(Fp8Format, CompressedFormat):
    kinds = ("float-quantized", "naive-quantized")


_FP8: dict[str, Any] = {"type": "float", "num_bits": 8, "symmetric": True}


@register
class Fp8RowFormat(_FloatQuantized):
    """`weight_scale` [rows, 1], in BF16 or float32."""

    name = "fp8-channel"
    arguments: ClassVar[dict[str, Any]] = {**_FP8, "strategy": "channel"}

    strategy: Literal["channel"] = "channel"
    activations: str | None = None

    def scaled(self, rows: int, columns: int) -> Scaling:
        """Each row."""
        return (1, columns), (rows, 1)

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The product in float32, rounded once."""
        return e4m3_to_float32(stored["weight"]).mul_(stored["weight_scale"].to(torch.float32)).to(dtype)


@register
class Fp8TensorFormat(RecastFormat, _FloatQuantized):
    """One `weight_scale` [1]; held with that scale once a row."""

    name = "fp8-tensor"
    arguments: ClassVar[dict[str, Any]] = {**_FP8, "strategy": "tensor"}

    activations: str | None = None

    @property
    def held_as(self) -> Fp8RowFormat:
        """A scale a row."""
        return Fp8RowFormat()

    def scaled(self, rows: int, columns: int) -> Scaling:
        """All."""
        return (rows, columns), (1,)


@register
class CompressedFp8BlockFormat(RecastFormat, _FloatQuantized):
    """FP8 blocks: with `weight_scale` in place of DeepSeek's `weight_scale_inv`."""

    name = "fp8-block"
    arguments: ClassVar[dict[str, Any]] = {**_FP8, "strategy": "block"}

    block_structure: tuple[BlockSide, BlockSide] = (128, 128)
    activations: str | None = None

    @property
    def held_as(self) -> Fp8BlockFormat:
        """DeepSeek's form."""
        return Fp8BlockFormat(weight_block_size=self.block_structure)

    def scaled(self, rows: int, columns: int) -> Scaling:
        """Each block."""
        return self.block_structure, block_grid((rows, columns), self.block_structure)
