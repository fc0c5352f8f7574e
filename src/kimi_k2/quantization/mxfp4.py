"""MXFP4 (OCP Microscaling Formats): four-bit floats with a power of two, an e8m0 byte, a group of 32 input columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import ConfigError
from kimi_k2.quantization.compressed_tensors import Scheme, config_of
from kimi_k2.quantization.e2m1 import pack_e2m1, unpack_e2m1
from kimi_k2.quantization.stored import Stored, StoredFormat, TensorSpec, register

GROUP = 32
_BIAS = 127
_NAN = 255


@register
class CompressedMxfp4Format(StoredFormat):
    """compressed-tensors': `weight_packed` uint8 [rows, columns / 2], `weight_scale` uint8 [rows, columns / 32]."""

    name = "mxfp4-packed"
    method = "compressed-tensors"
    suffixes = ("weight_packed", "weight_scale")
    unused = ("input_global_scale",)

    activations: str | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any], field: str) -> None:
        """Always None: `mixed.MixedFormat` asks `of_scheme`."""

    @classmethod
    def of_scheme(cls, scheme: Scheme) -> CompressedMxfp4Format | None:
        """Of 4-bit floats in groups of 32."""
        wanted = {"type": "float", "num_bits": 4, "strategy": "group", "symmetric": True, "group_size": GROUP}
        if scheme.kind != "mxfp4-pack-quantized" or not scheme.holds(**wanted):
            return None
        return cls(ignore=scheme.ignore, activations=scheme.activations)

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as compressed-tensors writes it."""
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True}
        return config_of("mxfp4-pack-quantized", weights, self.ignore, self.activations)

    @property
    def block(self) -> tuple[int, int]:
        """One row of 32 columns."""
        return 1, GROUP

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """Two values a byte, an exponent a group."""
        if columns % GROUP:
            raise ConfigError(f"{module} has {columns} input columns, which do not divide into groups of {GROUP}")
        yield TensorSpec(f"{module}.weight_packed", torch.uint8, (rows, columns // 2))
        yield TensorSpec(f"{module}.weight_scale", torch.uint8, (rows, columns // GROUP))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """Exact in float32, then rounded once."""
        scale = torch.exp2(stored["weight_scale"].to(torch.float32) - _BIAS)
        values = unpack_e2m1(stored["weight_packed"]).unflatten(-1, (-1, GROUP)).mul_(scale.unsqueeze(-1))
        weight: Tensor = values.flatten(-2).to(dtype)
        return weight

    def quantize(self, weight: Tensor) -> Stored:
        """With the exponent of a group's largest value, less that of 4, the largest of four bits."""
        groups = weight.to(torch.float32).unflatten(-1, (-1, GROUP))
        amax = groups.abs().amax(dim=-1).clamp(min=2.0**-120)
        exponent = torch.frexp(amax).exponent - 3
        values = groups / torch.exp2(exponent.to(torch.float32)).unsqueeze(-1)
        scale = (exponent + _BIAS).to(torch.uint8)
        return {"weight_packed": pack_e2m1(values.flatten(-2)), "weight_scale": scale}

    def contradiction(self, stored: Stored) -> tuple[str, str] | None:
        """The exponent of 255 is NaN."""
        bad = int((stored["weight_scale"] == _NAN).sum())
        return ("weight_scale", f"{bad} of {stored['weight_scale'].numel()} exponents are NaN (255)") if bad else None
