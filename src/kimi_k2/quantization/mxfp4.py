"""MXFP4 (OCP Microscaling Formats): four-bit floats with a power of two, an e8m0 byte, a group of 32 input columns.

The floats are e2m1: a sign, two bits of exponent, one of mantissa; two in a byte. The first of
two neighbours along the input dimension has the low half of the byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kimi_k2.config_fields import refuse_unknown, require
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.compressed_tensors import CompressedFormat
from kimi_k2.quantization.int4_group import pack_nibbles, times_scales, unpack_nibbles
from kimi_k2.quantization.modules import listed
from kimi_k2.quantization.stored import Shape, Stored, StoredFormat, register

E2M1_MAX = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
# Half way between neighbours; a tie goes to the even code, so that an odd code ends before it and an even one behind.
_MIDPOINTS = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES)])


def unpack_e2m1(packed: Tensor) -> Tensor:
    """float32 [..., N, K] of uint8 [..., N, K / 2]."""
    return _VALUES.to(packed.device)[unpack_nibbles(packed).to(torch.int32)]


def pack_e2m1(values: Tensor) -> Tensor:
    """uint8 [..., N, K / 2] of floats [..., N, K], rounded to nearest, ties to even; beyond 6 it is 6."""
    magnitude = values.abs().to(torch.float32)
    up = torch.bucketize(magnitude, _MIDPOINTS.to(values.device), right=True)
    down = torch.bucketize(magnitude, _MIDPOINTS.to(values.device))
    code = torch.where(up % 2 == 0, up, down).to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
    return pack_nibbles(code)


GROUP = 32
_BIAS = 127
_NAN = 255


class _Mxfp4(StoredFormat):
    """What both spellings share: values uint8 [rows, columns / 2], exponents uint8 [rows, columns / 32]."""

    group_size: ClassVar[int] = GROUP

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Two values a byte, an exponent a group."""
        return (torch.uint8, (rows, columns // 2)), (torch.uint8, (rows, columns // GROUP))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """Exact in float32, then rounded once."""
        packed, exponents = (stored[suffix] for suffix in self.suffixes)
        return times_scales(unpack_e2m1(packed), torch.exp2(exponents.to(torch.float32) - _BIAS)).to(dtype)

    def quantize(self, weight: Tensor) -> Stored:
        """With the exponent of a group's largest value, less that of 4, the largest of four bits."""
        groups = weight.to(torch.float32).unflatten(-1, (-1, GROUP))
        amax = groups.abs().amax(dim=-1).clamp(min=2.0**-120)
        exponent = torch.frexp(amax).exponent - 3
        values = groups / torch.exp2(exponent.to(torch.float32)).unsqueeze(-1)
        scale = (exponent + _BIAS).to(torch.uint8)
        return dict(zip(self.suffixes, (pack_e2m1(values.flatten(-2)), scale), strict=True))

    def contradiction(self, stored: Stored) -> tuple[str, str] | None:
        """The exponent of 255 is NaN."""
        exponents = stored["weight_scale"]
        bad = int((exponents == _NAN).sum())
        return ("weight_scale", f"{bad} of {exponents.numel()} exponents are NaN (255)") if bad else None


@register
class CompressedMxfp4Format(_Mxfp4, CompressedFormat):
    """compressed-tensors': `weight_packed` and `weight_scale`."""

    name = "mxfp4-packed"
    kinds = ("mxfp4-pack-quantized",)
    arguments: ClassVar[dict[str, Any]] = {
        "type": "float", "num_bits": 4, "strategy": "group", "symmetric": True, "group_size": GROUP,
    }  # fmt: skip
    suffixes = ("weight_packed", "weight_scale")
    unused = ("input_global_scale",)

    activations: str | None = None


# What quark says of a weight, and the one value of each that is read; how it was found is left out.
_WEIGHT: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp4",),
    "qscheme": ("per_group",),
    "group_size": (GROUP,),
    "ch_axis": (-1, 1),
    "scale_format": ("e8m0",),
    "is_dynamic": (False,),
    "is_scale_quant": (False, None),
    "symmetric": (True, None),
    "scale_calculation_mode": ("even", "floor", "ceil", None),
}
_FOUND = ("observer_cls", "round_method", "scale_type", "mx_element_dtype", "zero_point_type")
_NO_OTHERS: dict[str, tuple[Any, ...]] = {
    "layer_quant_config": ({}, None),
    "layer_type_quant_config": ({}, None),
    "softmax_quant_spec": (None,),
    "kv_cache_quant_config": ({}, None),
    "kv_cache_post_rope": (False, None),
    "algo_config": (None, []),
    "quant_mode": ("eager_mode", None),
}


@register
class QuarkMxfp4Format(_Mxfp4):
    """quark's: `weight` and `weight_scale`; `exclude` lists modules that stay unquantized."""

    name = "mxfp4"
    method = "quark"
    suffixes = ("weight", "weight_scale")
    unused = ("input_scale",)
    rule = "quark"

    @classmethod
    def parse(cls, raw: Mapping[str, Any], field: str) -> QuarkMxfp4Format:
        """Read quark's object."""
        read = ("quant_method", "global_quant_config", "exclude")
        refuse_unknown(raw, read, field, only=_NO_OTHERS, harmless=("export", "version", "quark_version"))
        where = f"{field}.global_quant_config"
        arguments = raw.get("global_quant_config")
        if not isinstance(arguments, Mapping) or not isinstance(arguments.get("weight"), Mapping):
            raise ConfigError("expected an object of quantization arguments", field=f"{where}.weight")
        only = {"output_tensors": (None,), "bias": (None,), "target_device": (None,)}
        refuse_unknown(arguments, ("weight", "input_tensors"), where, only=only, harmless=())
        require(arguments["weight"], ("dtype", "qscheme", "group_size"), f"{where}.weight")
        refuse_unknown(arguments["weight"], (), f"{where}.weight", only=_WEIGHT, harmless=_FOUND)
        return cls(ignore=listed(raw, cls.rule, field, "exclude"))

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as quark writes it."""
        weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": GROUP, "ch_axis": -1, "scale_format": "e8m0"}
        return {
            "quant_method": "quark",
            "global_quant_config": {"weight": {**weight, "is_dynamic": False}, "input_tensors": None},
            "exclude": list(self.ignore),
            "export": {"kv_cache_group": [], "pack_method": "reorder"},
        }
