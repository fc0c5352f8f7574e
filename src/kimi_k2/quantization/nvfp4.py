"""NVFP4: four-bit floats with an e4m3 scale a group of 16 along the input dimension, and one scale of all the weight.

modelopt multiplies by its second scale (`weight_scale_2`), compressed-tensors divides by its own
(`weight_global_scale`). Models and ranks hold that scale once a row, so that gate and up keep theirs where they are
stacked. Activations stay as they are: their static scales are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from kimi_k2.quantization.compressed_tensors import CompressedFormat
from kimi_k2.quantization.int4_group import times_scales
from kimi_k2.quantization.modelopt import ModeloptFormat
from kimi_k2.quantization.mxfp4 import E2M1_MAX, pack_e2m1, unpack_e2m1
from kimi_k2.quantization.stored import Shape, Stored, StoredFormat, TensorSpec, register

GROUP = 16
_E4M3_MAX = 448.0


class _Nvfp4(StoredFormat):
    """What both spellings share.

    Attributes:
        of_all: shape of the scale of all.
        divides: whether values are divided by it.
    """

    group_size: ClassVar[int] = GROUP
    of_all: ClassVar[tuple[int, ...]] = ()
    divides: ClassVar[bool] = False

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Two values a byte, an e4m3 scale a group, one float32 scale."""
        yield torch.uint8, (rows, columns // 2)
        yield torch.float8_e4m3fn, (rows, columns // GROUP)
        yield torch.float32, self.of_all

    def held(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """With the scale of all once a row."""
        *each, whole = self.specs(module, rows, columns)
        yield from each
        yield whole._replace(shape=(rows, 1))

    def hold(self, stored: Stored) -> Stored:
        """With the scale of all once a row."""
        packed, _, whole = self.suffixes
        if stored[whole].dim() > 1:
            return stored
        return {**stored, whole: stored[whole].reshape(1, 1).expand(len(stored[packed]), 1).contiguous()}

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The scales' product, then that with the values, in float32; rounded once."""
        held = self.hold(stored)
        packed, scale, whole = (held[suffix] for suffix in self.suffixes)
        scales = self._scales(scale.to(torch.float32), whole.to(torch.float32))
        return times_scales(unpack_e2m1(packed), scales).to(dtype)

    def quantize(self, weight: Tensor) -> Stored:
        """The scale of all lets the largest group's scale be 448; of each group, its largest value be 6."""
        groups = weight.to(torch.float32).unflatten(-1, (-1, GROUP))
        amax = groups.abs().amax(dim=-1)
        unit = (amax.max() / (_E4M3_MAX * E2M1_MAX)).clamp(min=1e-30)
        whole = (1 / unit if self.divides else unit).reshape(self.of_all)
        unit = self._scales(torch.ones(1, 1), whole.reshape(1, 1))
        scale = (amax / E2M1_MAX / unit).clamp(2**-9, _E4M3_MAX).to(torch.float8_e4m3fn)
        values = groups / self._scales(scale.to(torch.float32), whole.reshape(1, 1)).unsqueeze(-1)
        return dict(zip(self.suffixes, (pack_e2m1(values.flatten(-2)), scale, whole), strict=True))

    def _scales(self, scale: Tensor, whole: Tensor) -> Tensor:
        """float32 scales of the groups."""
        return scale / whole if self.divides else scale * whole


@register
class Nvfp4Format(_Nvfp4, ModeloptFormat):
    """modelopt's: `weight` uint8 [rows, columns / 2], `weight_scale` e4m3, `weight_scale_2` float32."""

    name = "nvfp4"
    suffixes = ("weight", "weight_scale", "weight_scale_2")
    scales = ("weight_scale", "weight_scale_2")
    algorithms = ("NVFP4",)
    bits = 4


@register
class CompressedNvfp4Format(_Nvfp4, CompressedFormat):
    """compressed-tensors': `weight_packed`, `weight_scale`, `weight_global_scale` float32 [1]."""

    name = "nvfp4-packed"
    kinds = ("nvfp4-pack-quantized",)
    arguments: ClassVar[dict[str, Any]] = {
        "type": "float", "num_bits": 4, "strategy": "tensor_group", "symmetric": True, "group_size": GROUP,
    }  # fmt: skip
    suffixes = ("weight_packed", "weight_scale", "weight_global_scale")
    scales = ("weight_scale",)
    unused = ("input_global_scale",)
    of_all = (1,)
    divides = True

    activations: str | None = None
