"""FP8 e4m3 weights as compressed-tensors stores them (`float-quantized`): one scale, one a channel or one a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from kimi_k2.errors import ConfigError
from kimi_k2.quantization.compressed_tensors import Scheme, config_of
from kimi_k2.quantization.fp8_block import E4M3_MAX, Fp8BlockFormat, block_grid, e4m3_to_float32
from kimi_k2.quantization.stored import (
    BlockSide,
    RecastFormat,
    Stored,
    StoredFormat,
    TensorSpec,
    named_errors,
    register,
)

_KINDS = ("float-quantized", "naive-quantized")


def _is_fp8(scheme: Scheme, strategy: str, **more: Any) -> bool:
    """Whether a group is stored as 8-bit floats with a scale a `strategy`."""
    return scheme.kind in _KINDS and scheme.holds(type="float", num_bits=8, strategy=strategy, symmetric=True, **more)


def _config(of: StoredFormat, strategy: str, activations: str | None, **more: Any) -> dict[str, Any]:
    """`quantization_config` of such a format as compressed-tensors writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return config_of("float-quantized", weights, of.ignore, activations)


@register
class Fp8RowFormat(StoredFormat):
    """`weight` e4m3 [rows, columns] and `weight_scale` [rows, 1], in BF16 or float32.

    Activations stay as they are, whatever `input_activations` says: static scales of them are left out.
    """

    name = "fp8-channel"
    method = "compressed-tensors"
    suffixes = ("weight", "weight_scale")
    scales = ("weight_scale",)
    unused = ("input_scale",)

    strategy: Literal["channel"] = "channel"
    activations: str | None = None

    @classmethod
    def of_scheme(cls, scheme: Scheme) -> Fp8RowFormat | None:
        """Of 8-bit floats with a scale a channel."""
        if not _is_fp8(scheme, "channel"):
            return None
        return cls(ignore=scheme.ignore, activations=scheme.activations)

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as compressed-tensors writes it."""
        return _config(self, "channel", self.activations)

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """Values, and a scale a row."""
        yield TensorSpec(f"{module}.weight", torch.float8_e4m3fn, (rows, columns))
        yield TensorSpec(f"{module}.weight_scale", torch.float32, (rows, 1))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The product in float32, rounded once."""
        return e4m3_to_float32(stored["weight"]).mul_(stored["weight_scale"].to(torch.float32)).to(dtype)

    def quantize(self, weight: Tensor) -> Stored:
        """With scale = amax / 448 a row; a row of zeros gets scale 1."""
        plain = weight.to(torch.float32)
        scale = plain.abs().amax(dim=-1, keepdim=True) / E4M3_MAX
        scale.masked_fill_(scale == 0, 1.0)
        return {"weight": (plain / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


@register
class Fp8TensorFormat(RecastFormat):
    """`weight` e4m3 [rows, columns] and one `weight_scale` [1]; held with that scale once a row."""

    name = "fp8-tensor"
    method = "compressed-tensors"
    suffixes = ("weight", "weight_scale")
    scales = ("weight_scale",)
    unused = ("input_scale",)

    activations: str | None = None

    @classmethod
    def of_scheme(cls, scheme: Scheme) -> Fp8TensorFormat | None:
        """Of 8-bit floats with one scale."""
        if not _is_fp8(scheme, "tensor"):
            return None
        return cls(ignore=scheme.ignore, activations=scheme.activations)

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as compressed-tensors writes it."""
        return _config(self, "tensor", self.activations)

    @property
    def held_as(self) -> Fp8RowFormat:
        """A scale a row."""
        return Fp8RowFormat()

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """Values and a scale."""
        yield TensorSpec(f"{module}.weight", torch.float8_e4m3fn, (rows, columns))
        yield TensorSpec(f"{module}.weight_scale", torch.float32, (1,))

    def hold(self, stored: Stored) -> Stored:
        """The scale once a row."""
        scale = stored["weight_scale"].to(torch.float32)
        if scale.dim() > 1:
            return stored
        return {"weight": stored["weight"], "weight_scale": scale.reshape(1, 1).repeat(len(stored["weight"]), 1)}

    def quantize(self, weight: Tensor) -> Stored:
        """With scale = amax / 448, 1 for zeros."""
        plain = weight.to(torch.float32)
        amax = plain.abs().amax().reshape(1)
        scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
        return {"weight": (plain / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


@register
class CompressedFp8BlockFormat(RecastFormat):
    """FP8 blocks as compressed-tensors stores them: with `weight_scale` in place of `weight_scale_inv`."""

    name = "fp8-block"
    method = "compressed-tensors"
    suffixes = ("weight", "weight_scale")
    scales = ("weight_scale",)
    unused = ("input_scale",)

    block_structure: tuple[BlockSide, BlockSide] = (128, 128)
    activations: str | None = None

    @classmethod
    def of_scheme(cls, scheme: Scheme) -> CompressedFp8BlockFormat | None:
        """Of 8-bit floats with a scale a block."""
        block = scheme.weights.get("block_structure")
        if not _is_fp8(scheme, "block", block_structure=block):
            return None
        if not isinstance(block, list):
            raise ConfigError(f"expected two block sizes, got {block!r:.100}", field=scheme.name("block_structure"))
        with named_errors(f"{scheme.field}.weights"):
            return cls(block_structure=tuple(block), ignore=scheme.ignore, activations=scheme.activations)

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as compressed-tensors writes it."""
        return _config(self, "block", self.activations, block_structure=list(self.block_structure))

    @property
    def held_as(self) -> Fp8BlockFormat:
        """DeepSeek's form."""
        return Fp8BlockFormat(weight_block_size=self.block_structure)

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """Values, and a scale a block."""
        yield TensorSpec(f"{module}.weight", torch.float8_e4m3fn, (rows, columns))
        yield TensorSpec(f"{module}.weight_scale", torch.float32, block_grid((rows, columns), self.block_structure))

    def hold(self, stored: Stored) -> Stored:
        """Under DeepSeek's names; what has them is given back."""
        if "weight_scale_inv" in stored:
            return stored
        return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}

    def quantize(self, weight: Tensor) -> Stored:
        """As blocks of DeepSeek's form."""
        return dict(zip(self.suffixes, self.held_as.quantize(weight).values(), strict=True))
