"""FP8 e4m3 weights as compressed-tensors stores them (`float-quantized`): one scale, one a channel or one a block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kimi_k2.quantization.compressed_tensors import CompressedFormat
from kimi_k2.quantization.fp8_block import Fp8BlockFormat, block_grid, e4m3_to_float32, quantize_fp8_block
from kimi_k2.quantization.stored import BlockSide, RecastFormat, Shape, Stored, register


class _Fp8(CompressedFormat):
    """`weight` e4m3 [rows, columns] and `weight_scale`, of which each says its shape.

    Activations stay as they are, whatever `input_activations` says: static scales of them are left out.
    """

    kinds = ("float-quantized", "naive-quantized")
    suffixes = ("weight", "weight_scale")
    scales = ("weight_scale",)
    unused = ("input_scale",)


_FP8: dict[str, Any] = {"type": "float", "num_bits": 8, "symmetric": True}


@register
class Fp8RowFormat(_Fp8):
    """`weight_scale` [rows, 1], in BF16 or float32."""

    name = "fp8-channel"
    arguments: ClassVar[dict[str, Any]] = {**_FP8, "strategy": "channel"}

    strategy: Literal["channel"] = "channel"
    activations: str | None = None

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Values, and a scale a row."""
        return (torch.float8_e4m3fn, (rows, columns)), (torch.float32, (rows, 1))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The product in float32, rounded once."""
        return e4m3_to_float32(stored["weight"]).mul_(stored["weight_scale"].to(torch.float32)).to(dtype)

    def quantize(self, weight: Tensor) -> Stored:
        """With scale = amax / 448 a row; a row of zeros gets scale 1."""
        return dict(zip(self.suffixes, quantize_fp8_block(weight, (1, weight.shape[-1])), strict=True))


@register
class Fp8TensorFormat(RecastFormat, _Fp8):
    """One `weight_scale` [1]; held with that scale once a row."""

    name = "fp8-tensor"
    arguments: ClassVar[dict[str, Any]] = {**_FP8, "strategy": "tensor"}

    activations: str | None = None

    @property
    def held_as(self) -> Fp8RowFormat:
        """A scale a row."""
        return Fp8RowFormat()

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Values and a scale."""
        return (torch.float8_e4m3fn, (rows, columns)), (torch.float32, (1,))

    def hold(self, stored: Stored) -> Stored:
        """The scale once a row."""
        scale = stored["weight_scale"].to(torch.float32)
        if scale.dim() > 1:
            return stored
        return {"weight": stored["weight"], "weight_scale": scale.reshape(1, 1).repeat(len(stored["weight"]), 1)}

    def quantize(self, weight: Tensor) -> Stored:
        """With scale = amax / 448, 1 for zeros."""
        values, scale = quantize_fp8_block(weight, (weight.shape[-2], weight.shape[-1]))
        return {"weight": values, "weight_scale": scale.reshape(1)}


@register
class CompressedFp8BlockFormat(RecastFormat, _Fp8):
    """FP8 blocks: with `weight_scale` in place of DeepSeek's `weight_scale_inv`."""

    name = "fp8-block"
    arguments: ClassVar[dict[str, Any]] = {**_FP8, "strategy": "block"}

    block_structure: tuple[BlockSide, BlockSide] = (128, 128)
    activations: str | None = None

    @property
    def held_as(self) -> Fp8BlockFormat:
        """DeepSeek's form."""
        return Fp8BlockFormat(weight_block_size=self.block_structure)

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Values, and a scale a block."""
        grid = block_grid((rows, columns), self.block_structure)
        return (torch.float8_e4m3fn, (rows, columns)), (torch.float32, grid)

    def hold(self, stored: Stored) -> Stored:
        """Under DeepSeek's names; what has them is given back."""
        if "weight_scale_inv" in stored:
            return stored
        return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}

    def quantize(self, weight: Tensor) -> Stored:
        """As blocks of DeepSeek's form."""
        return dict(zip(self.suffixes, self.held_as.quantize(weight).values(), strict=True))
