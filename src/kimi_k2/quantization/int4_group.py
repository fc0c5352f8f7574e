"""Symmetric INT4 weights in groups along the input dimension, in compressed-tensors' `pack-quantized` layout.

Eight values share an int32, the least significant nibble first, each stored as value + 8. There is no zero point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from pydantic import field_validator
from torch import Tensor

from kimi_k2.errors import ConfigError
from kimi_k2.quantization.compressed_tensors import Scheme, config_of
from kimi_k2.quantization.draw import filled, scale_factors
from kimi_k2.quantization.stored import (
    BlockSide,
    RecastFormat,
    Stored,
    StoredFormat,
    TensorSpec,
    named_errors,
    register,
)

VALUES_PER_WORD = 8
OFFSET = 8
MAX_VALUE = 7  # symmetric: -8 is representable but a symmetric quantizer leaves it unused


def pack_int4(values: Tensor) -> Tensor:
    """Pack integers in -8..7, int8 [..., N, K], to int32 [..., N, ceil(K / 8)]; spare nibbles are 0 bits."""
    nibbles = (values + OFFSET).view(torch.uint8)
    nibbles = torch.nn.functional.pad(nibbles, (0, -values.shape[-1] % VALUES_PER_WORD))
    # Two values a byte, then the bytes are reread as little-endian words.
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).contiguous().view(torch.int32)


def unpack_int4(weight_packed: Tensor, columns: int) -> Tensor:
    """Unpack int32 [..., N, ceil(K / 8)] to int8 [..., N, K] with K = `columns`, values in -8..7.

    Raises:
        ValueError: `weight_packed` is not int32 or has another number of words.
    """
    if weight_packed.dtype != torch.int32:
        raise ValueError(f"weight_packed: expected int32, got {weight_packed.dtype}")
    if weight_packed.shape[-1] != -(-columns // VALUES_PER_WORD):
        raise ValueError(
            f"weight_packed: expected {-(-columns // VALUES_PER_WORD)} words for {columns} columns, "
            f"got {weight_packed.shape[-1]}"
        )
    packed = weight_packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :columns]
    return nibbles.view(torch.int8) - OFFSET


def dequantize_int4_group(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Tensor | tuple[int, int],
    group_size: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Unpack and multiply every group by its scale.

    Args:
        weight_packed: int32 [..., N, ceil(K / 8)].
        weight_scale: bfloat16 or float32 [..., N, K / group_size].
        weight_shape: (N, K), as a tuple or the checkpoint's int32 tensor of two elements.
        group_size: input columns that share a scale.
        dtype: of the result; the product is formed in float32 and rounded once.

    Returns:
        [..., N, K] in `dtype`.

    Raises:
        ValueError: a shape or dtype disagrees with `weight_shape`.
    """
    rows, columns = (int(size) for size in weight_shape)
    if weight_packed.shape[-2] != rows:
        raise ValueError(f"weight_packed: expected {rows} rows (weight_shape), got {weight_packed.shape[-2]}")
    if columns % group_size or weight_scale.shape[-2:] != (rows, columns // group_size):
        raise ValueError(
            f"weight_scale: expected [..., {rows}, {columns} / {group_size}], got {list(weight_scale.shape)}"
        )
    values = unpack_int4(weight_packed, columns).to(torch.float32).unflatten(-1, (-1, group_size))
    values *= weight_scale.to(torch.float32).unsqueeze(-1)
    out: Tensor = values.flatten(-2).to(dtype)
    return out


def quantize_int4_group(
    weight: Tensor, group_size: int = 32, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize symmetrically with scale = amax / 7 a group, rounded to `scale_dtype` before it is used.

    Args:
        weight: floating [..., N, K], K a multiple of `group_size`.
        group_size: input columns that share a scale.
        scale_dtype: of the scales.

    Returns:
        (weight_packed int32 [..., N, K / 8], weight_scale [..., N, K / group_size], weight_shape int32 [2]).
    """
    rows, columns = weight.shape[-2:]
    if columns % group_size:
        raise ValueError(f"weight: expected a multiple of {group_size} columns, got {columns}")
    groups = weight.to(torch.float32).unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(dim=-1)
    scale = torch.where(amax > 0, amax / MAX_VALUE, torch.ones_like(amax)).to(scale_dtype)
    values = (groups / scale.to(torch.float32).unsqueeze(-1)).round_().clamp_(-MAX_VALUE, MAX_VALUE)
    packed = pack_int4(values.to(torch.int8).flatten(-2))
    return packed, scale, torch.tensor([rows, columns], dtype=torch.int32)


def whole_words(size: int) -> int:
    """A group's size, refused if a word would hold values of two groups."""
    if size % VALUES_PER_WORD:
        raise ConfigError(f"expected a multiple of {VALUES_PER_WORD}, since as many share a word, got {size}")
    return size


def check_columns(
    module: str, columns: int, group_size: int, field: str = "quantization_config.config_groups.*.weights.group_size"
) -> None:
    """Refuse a weight whose input columns do not divide into groups.

    Raises:
        ConfigError: they do not.
    """
    if columns % group_size:
        raise ConfigError(
            f"{module} has {columns} input columns, which do not divide into groups of {group_size}", field=field
        )


def scheme_arguments(scheme: Scheme, needed: tuple[str, ...] = ("group_size",)) -> dict[str, Any]:
    """The weights' arguments of a group that is packed into words.

    Raises:
        ConfigError: one of `needed` is missing, or there are blocks.
    """
    for name in needed:
        if name not in scheme.weights:
            raise ConfigError("missing", field=scheme.name(name))
    if scheme.weights.get("block_structure") is not None:
        raise ConfigError("expected null", field=scheme.name("block_structure"))
    keys = ("num_bits", "group_size", "strategy", "symmetric", "type", "dynamic", "actorder")
    return {key: scheme.weights[key] for key in keys if key in scheme.weights}


DEFAULT_INT4_IGNORE = (
    "lm_head",
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)


@register
class Int4GroupFormat(StoredFormat):
    """compressed-tensors `pack-quantized` INT4, symmetric, one scale a group along the input dimension.

    `ignore` lists exact module names, or regular expressions after `re:`, that stay unquantized.
    """

    name = "int4"
    method = "compressed-tensors"
    suffixes = ("weight_packed", "weight_scale", "weight_shape")
    scales = ("weight_scale",)
    implied = ("weight_shape",)
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
    def of_scheme(cls, scheme: Scheme) -> Int4GroupFormat | None:
        """Whatever is packed into 32-bit words; what is not supported is named."""
        if scheme.kind != "pack-quantized" or scheme.weights.get("symmetric") is False or _is_channel(scheme):
            return None
        arguments = scheme_arguments(scheme)
        with named_errors(f"{scheme.field}.weights"):
            return cls.model_validate({"ignore": scheme.ignore, "activations": scheme.activations, **arguments})

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as compressed-tensors writes it."""
        keys = ("num_bits", "group_size", "strategy", "symmetric", "type", "dynamic", "actorder")
        return config_of(self.format, {key: getattr(self, key) for key in keys}, self.ignore, self.activations)

    @property
    def block(self) -> tuple[int, int]:
        """One row of `group_size` columns."""
        return 1, self.group_size

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """Eight values a word, a BF16 scale a group, and the weight's shape."""
        check_columns(module, columns, self.group_size)
        words, groups = -(-columns // VALUES_PER_WORD), columns // self.group_size
        yield TensorSpec(f"{module}.weight_packed", torch.int32, (rows, words))
        yield TensorSpec(f"{module}.weight_scale", torch.bfloat16, (rows, groups))
        yield TensorSpec(f"{module}.weight_shape", torch.int32, (2,))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """See `dequantize_int4_group`."""
        packed, scale = stored["weight_packed"], stored["weight_scale"]
        if "weight_shape" in stored:
            rows, columns = stored["weight_shape"].tolist()
        else:
            rows, columns = packed.shape[-2], scale.shape[-1] * self.group_size
        return dequantize_int4_group(packed, scale, (rows, columns), self.group_size, dtype)

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
            nibbles = torch.randint(1, 16, (size, 4, 2), dtype=torch.uint8, generator=own)
            return (nibbles[..., 0] | (nibbles[..., 1] << 4)).view(torch.int32).view(-1)

        shape = (rows, -(-columns // VALUES_PER_WORD))
        return filled(math.prod(shape), torch.int32, words).view(shape)

    def contradiction(self, stored: Stored) -> tuple[str, str] | None:
        """`weight_shape` is data, not a header: a wrong one passes the header checks."""
        rows, words = stored["weight_packed"].shape
        shape = stored["weight_shape"].tolist()
        if shape[0] == rows and -(-shape[1] // VALUES_PER_WORD) == words:
            return None
        return "weight_shape", f"says {shape}, but weight_packed is {[rows, words]}"


def _is_channel(scheme: Scheme) -> bool:
    return scheme.weights.get("strategy") == "channel" and scheme.weights.get("group_size") in (None, -1)


@register
class Int4ChannelFormat(RecastFormat):
    """compressed-tensors `pack-quantized` INT4, symmetric, a scale an output channel; held as groups that repeat it."""

    name = "int4-channel"
    method = "compressed-tensors"
    suffixes = ("weight_packed", "weight_scale", "weight_shape")
    scales = ("weight_scale",)
    implied = ("weight_shape",)

    num_bits: Literal[4] = 4
    strategy: Literal["channel"] = "channel"
    symmetric: Literal[True] = True
    type: Literal["int"] = "int"
    dynamic: Literal[False] = False
    actorder: None = None
    activations: str | None = None

    @classmethod
    def of_scheme(cls, scheme: Scheme) -> Int4ChannelFormat | None:
        """Symmetric, with no group's size."""
        if scheme.kind != "pack-quantized" or scheme.weights.get("symmetric") is False or not _is_channel(scheme):
            return None
        arguments = scheme_arguments(scheme, needed=())
        arguments.pop("group_size", None)
        with named_errors(f"{scheme.field}.weights"):
            return cls.model_validate({"ignore": scheme.ignore, "activations": scheme.activations, **arguments})

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as compressed-tensors writes it."""
        keys = ("num_bits", "strategy", "symmetric", "type", "dynamic", "actorder")
        weights = {**{key: getattr(self, key) for key in keys}, "group_size": None}
        return config_of("pack-quantized", weights, self.ignore, self.activations)

    @property
    def held_as(self) -> Int4GroupFormat:
        """Groups of 32, which kernels read and ranks may cut."""
        return Int4GroupFormat(ignore=())

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """Eight values a word, a BF16 scale a row, and the weight's shape."""
        packed, scale, shape = self.held_as.specs(module, rows, columns)
        yield from (packed, scale._replace(shape=(rows, 1)), shape)

    def hold(self, stored: Stored) -> Stored:
        """The scale of a row once a group."""
        packed, scale = stored["weight_packed"], stored["weight_scale"]
        groups = packed.shape[-1] * VALUES_PER_WORD // self.held_as.group_size
        return {"weight_packed": packed, "weight_scale": scale.expand(*scale.shape[:-1], groups).contiguous()}

    def quantize(self, weight: Tensor) -> Stored:
        """See `quantize_int4_group`."""
        return dict(zip(self.suffixes, quantize_int4_group(weight, weight.shape[-1]), strict=True))

    def contradiction(self, stored: Stored) -> tuple[str, str] | None:
        """As of groups."""
        return self.held_as.contradiction(stored)


# Standard deviation of integers uniform over -7..7.
_VALUE_STD = math.sqrt(56 / 3)
