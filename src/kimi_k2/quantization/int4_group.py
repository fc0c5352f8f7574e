"""Symmetric INT4 weights in groups along the input dimension, in compressed-tensors' `pack-quantized` layout.

Eight values share an int32, the least significant nibble first, each stored as value + 8. There is no zero point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import field_validator
from torch import Tensor

from kimi_k2.errors import ConfigError
from kimi_k2.quantization.compressed_tensors import CompressedFormat, Scheme
from kimi_k2.quantization.draw import filled, scale_factors
from kimi_k2.quantization.stored import BlockSide, RecastFormat, Shape, Stored, register

VALUES_PER_WORD = 8
OFFSET = 8
MAX_VALUE = 7  # symmetric: -8 is representable but a symmetric quantizer leaves it unused


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Codes 0 to 15, uint8 [..., K] with even K, to uint8 [..., K / 2]; the first of two has the low half."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The reverse; of wider integers byte by byte, the lowest first."""
    octets = packed.contiguous().view(torch.uint8)
    return torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2)


def pack_int4(values: Tensor) -> Tensor:
    """Pack integers in -8..7, int8 [..., N, K], to int32 [..., N, ceil(K / 8)]; spare nibbles are 0 bits."""
    nibbles = torch.nn.functional.pad((values + OFFSET).view(torch.uint8), (0, -values.shape[-1] % VALUES_PER_WORD))
    return pack_nibbles(nibbles).contiguous().view(torch.int32)


def unpack_int4(weight_packed: Tensor, columns: int) -> Tensor:
    """Unpack int32 [..., N, ceil(K / 8)] to int8 [..., N, K] with K = `columns`, values in -8..7."""
    return unpack_nibbles(weight_packed)[..., :columns].view(torch.int8) - OFFSET


def times_scales(values: Tensor, scale: Tensor) -> Tensor:
    """Values [..., K] times the scale [..., G] of their group, in the values' memory."""
    product: Tensor = values.unflatten(-1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1)).flatten(-2)
    return product


def dequantize_int4_group(
    weight_packed: Tensor, weight_scale: Tensor, group_size: int = 32, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Unpack and multiply every group by its scale.

    Args:
        weight_packed: int32 [..., N, K / 8].
        weight_scale: bfloat16 or float32 [..., N, K / group_size].
        group_size: input columns that share a scale.
        dtype: of the result; the product is formed in float32 and rounded once.

    Returns:
        [..., N, K] in `dtype`.
    """
    values = unpack_int4(weight_packed, weight_scale.shape[-1] * group_size).to(torch.float32)
    return times_scales(values, weight_scale.to(torch.float32)).to(dtype)


def quantize_int4_group(weight: Tensor, group_size: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize symmetrically with scale = amax / 7 a group, rounded to BF16 before it is used.

    Args:
        weight: floating [..., N, K], K a multiple of `group_size`.
        group_size: input columns that share a scale.

    Returns:
        (weight_packed int32 [..., N, K / 8], weight_scale [..., N, K / group_size], weight_shape int32 [2]).
    """
    rows, columns = weight.shape[-2:]
    groups = weight.to(torch.float32).unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(dim=-1)
    scale = torch.where(amax > 0, amax / MAX_VALUE, torch.ones_like(amax)).to(torch.bfloat16)
    values = (groups / scale.to(torch.float32).unsqueeze(-1)).round_().clamp_(-MAX_VALUE, MAX_VALUE)
    packed = pack_int4(values.to(torch.int8).flatten(-2))
    return packed, scale, torch.tensor([rows, columns], dtype=torch.int32)


def whole_words(size: int) -> int:
    """A group's size, refused if a word would hold values of two groups."""
    if size % VALUES_PER_WORD:
        raise ConfigError(f"expected a multiple of {VALUES_PER_WORD}, since as many share a word, got {size}")
    return size


DEFAULT_INT4_IGNORE = (
    "lm_head",
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)


class PackedFormat(CompressedFormat):
    """INT4 packed into 32-bit words, beside the weight's shape."""

    kinds = ("pack-quantized",)
    scales = ("weight_scale",)
    implied = ("weight_shape",)

    def contradiction(self, stored: Stored) -> tuple[str, str] | None:
        """`weight_shape` is data, not a header: a wrong one passes the header checks."""
        rows, words = stored["weight_packed"].shape
        shape = stored["weight_shape"].tolist()
        if shape[0] == rows and -(-shape[1] // VALUES_PER_WORD) == words:
            return None
        return "weight_shape", f"says {shape}, but weight_packed is {[rows, words]}"


@register
class Int4GroupFormat(PackedFormat):
    """compressed-tensors `pack-quantized` INT4, symmetric, one scale a group along the input dimension.

    `ignore` lists exact module names, or regular expressions after `re:`, that stay unquantized.
    """

    name = "int4"
    suffixes = ("weight_packed", "weight_scale", "weight_shape")
    added = ("activations",)

    quant_method: Literal["compressed-tensors"] = "compressed-tensors"
    format: Literal["pack-quantized"] = "pack-quantized"
    num_bits: Literal[4] = 4
    group_size: BlockSide = 32
    strategy: Literal["group"] = "group"
    symmetric: Literal[True] = True
    type: Literal["int"] = "int"
    dynamic: Literal[False] = False
    actorder: Literal["weight", "static"] | None = None
    ignore: tuple[str, ...] = DEFAULT_INT4_IGNORE
    activations: str | None = None

    _whole_words = field_validator("group_size")(whole_words)

    @classmethod
    def describes(cls, scheme: Scheme, own: dict[str, Any]) -> bool:
        """Whatever is packed into 32-bit words without zero points; what is not supported is named."""
        return scheme.weights.get("symmetric") is not False and not _is_channel(scheme)

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Eight values a word, a BF16 scale a group, and the weight's shape."""
        words, groups = -(-columns // VALUES_PER_WORD), columns // self.group_size
        return (torch.int32, (rows, words)), (torch.bfloat16, (rows, groups)), (torch.int32, (2,))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """See `dequantize_int4_group`."""
        return dequantize_int4_group(stored["weight_packed"], stored["weight_scale"], self.group_size, dtype)

    def quantize(self, weight: Tensor) -> Stored:
        """See `quantize_int4_group`."""
        return dict(zip(self.suffixes, quantize_int4_group(weight, self.group_size), strict=True))

    def draw(
        self, suffix: str, rows: int, columns: int, std: float, generator: Callable[[str], torch.Generator]
    ) -> Tensor:
        """Values uniform over -7..7, and scales to match."""
        if suffix == "weight_shape":
            return torch.tensor([rows, columns], dtype=torch.int32)
        own = generator(suffix)
        if suffix == "weight_scale":
            shape = (rows, columns // self.group_size)
            return scale_factors(math.prod(shape), std / _VALUE_STD, own).to(torch.bfloat16).view(shape)

        def words(size: int) -> Tensor:
            nibbles = torch.randint(1, 16, (size * VALUES_PER_WORD,), dtype=torch.uint8, generator=own)
            return pack_nibbles(nibbles).view(torch.int32)

        shape = (rows, -(-columns // VALUES_PER_WORD))
        return filled(math.prod(shape), torch.int32, words).view(shape)


def _is_channel(scheme: Scheme) -> bool:
    return scheme.weights.get("strategy") == "channel" and scheme.weights.get("group_size") in (None, -1)


@register
class Int4ChannelFormat(RecastFormat, PackedFormat):
    """compressed-tensors `pack-quantized` INT4, symmetric, a scale an output channel; held as groups that repeat it."""

    name = "int4-channel"
    suffixes = ("weight_packed", "weight_scale", "weight_shape")
    arguments: ClassVar[dict[str, Any]] = {"group_size": None}

    num_bits: Literal[4] = 4
    strategy: Literal["channel"] = "channel"
    symmetric: Literal[True] = True
    type: Literal["int"] = "int"
    dynamic: Literal[False] = False
    actorder: None = None
    activations: str | None = None

    @classmethod
    def describes(cls, scheme: Scheme, own: dict[str, Any]) -> bool:
        """Symmetric, with no group's size."""
        return scheme.weights.get("symmetric") is not False and _is_channel(scheme)

    @property
    def held_as(self) -> Int4GroupFormat:
        """Groups of 32, which kernels read and ranks may cut."""
        return Int4GroupFormat(ignore=())

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Eight values a word, a BF16 scale a row, and the weight's shape."""
        return (torch.int32, (rows, -(-columns // VALUES_PER_WORD))), (torch.bfloat16, (rows, 1)), (torch.int32, (2,))

    def hold(self, stored: Stored) -> Stored:
        """The scale of a row once a group."""
        packed, scale = stored["weight_packed"], stored["weight_scale"]
        groups = packed.shape[-1] * VALUES_PER_WORD // self.held_as.group_size
        return {"weight_packed": packed, "weight_scale": scale.expand(*scale.shape[:-1], groups).contiguous()}

    def quantize(self, weight: Tensor) -> Stored:
        """See `quantize_int4_group`."""
        return dict(zip(self.suffixes, quantize_int4_group(weight, weight.shape[-1]), strict=True))


# Standard deviation of integers uniform over -7..7.
_VALUE_STD = math.sqrt(56 / 3)
