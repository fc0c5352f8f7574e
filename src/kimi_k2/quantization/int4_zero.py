"""INT4 groups with a zero point, as compressed-tensors, AWQ and GPTQ store them: value = (code - zero) times scale.

The three differ in how codes share a 32-bit word. Models and ranks hold one form: codes as `int4_group` packs them,
zero points as int8 and scales as float32, one a row and group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from pydantic import field_validator
from torch import Tensor

from kimi_k2.config_fields import refuse_unknown, require
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.compressed_tensors import Scheme
from kimi_k2.quantization.int4_group import (
    OFFSET,
    VALUES_PER_WORD,
    PackedFormat,
    pack_int4,
    pack_nibbles,
    times_scales,
    unpack_int4,
    unpack_nibbles,
    whole_words,
)
from kimi_k2.quantization.modules import listed, module_list
from kimi_k2.quantization.stored import BlockSide, RecastFormat, Shape, Stored, TensorSpec, register

_RANGE = 15


@register
class Int4ZeroFormat(PackedFormat):
    """compressed-tensors `pack-quantized` INT4, asymmetric.

    `weight_packed` and `weight_scale` as in `int4_group`; `weight_zero_point` int32 [rows / 8, groups], eight rows a
    word.
    """

    name = "int4-zero"
    suffixes = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")

    num_bits: Literal[4] = 4
    group_size: BlockSide = 128
    strategy: Literal["group"] = "group"
    symmetric: Literal[False] = False
    type: Literal["int"] = "int"
    dynamic: Literal[False] = False
    actorder: Literal["weight", "static"] | None = None
    activations: str | None = None

    _whole_words = field_validator("group_size")(whole_words)

    @classmethod
    def describes(cls, scheme: Scheme, own: dict[str, Any]) -> bool:
        """Whatever is packed into 32-bit words and has zero points; what is not supported is named."""
        return scheme.weights.get("symmetric") is False

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Eight values a word, a scale and a zero point a group, and the weight's shape."""
        groups = columns // self.group_size
        yield torch.int32, (rows, columns // VALUES_PER_WORD)
        yield torch.bfloat16, (rows, groups)
        yield torch.int32, (-(-rows // VALUES_PER_WORD), groups)
        yield torch.int32, (2,)

    def held(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """Scales in float32, zero points in int8, a row and group each."""
        packed, scale, zero, _ = self.specs(module, rows, columns)
        yield packed
        yield scale._replace(dtype=torch.float32)
        yield TensorSpec(zero.name, torch.int8, scale.shape)

    def hold(self, stored: Stored) -> Stored:
        """Zero points unpacked."""
        packed, scale, zero = (stored[suffix] for suffix in self.suffixes[:3])
        if zero.dtype == torch.int32:
            zero = unpack_int4(zero.T.contiguous(), scale.shape[0]).T.contiguous()
        return {"weight_packed": packed, "weight_scale": scale.to(torch.float32), "weight_zero_point": zero}

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """In float32, rounded once."""
        tensors = self.hold(stored)
        packed, scale, zero = (tensors[suffix] for suffix in self.suffixes[:3])
        values = unpack_int4(packed, scale.shape[-1] * self.group_size).to(torch.float32)
        values.unflatten(-1, (-1, self.group_size)).sub_(zero.unsqueeze(-1))
        return times_scales(values, scale).to(dtype)

    def quantize(self, weight: Tensor) -> Stored:
        """The smallest and largest value of a group, and zero, become the ends of -8 to 7."""
        groups = weight.to(torch.float32).unflatten(-1, (-1, self.group_size))
        low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
        scale = ((high - low) / _RANGE).to(torch.bfloat16)
        scale.masked_fill_(scale == 0, 1.0)
        wide = scale.to(torch.float32)
        zero = (-OFFSET - low / wide).round_().clamp_(-OFFSET, OFFSET - 1)
        codes = (groups / wide.unsqueeze(-1) + zero.unsqueeze(-1)).round_().clamp_(-OFFSET, OFFSET - 1)
        rows, columns = weight.shape
        return {
            "weight_packed": pack_int4(codes.to(torch.int8).flatten(-2)),
            "weight_scale": scale,
            "weight_zero_point": pack_int4(zero.to(torch.int8).T.contiguous()).T.contiguous(),
            "weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
        }


class _Transposed(RecastFormat):
    """AWQ and GPTQ: `qweight`, `qzeros`, `scales`, with the input dimension first."""

    bits: Literal[4] = 4
    group_size: BlockSide = 128

    _whole_words = field_validator("group_size")(whole_words)

    @property
    def held_as(self) -> Int4ZeroFormat:
        """Groups with zero points."""
        return Int4ZeroFormat(group_size=self.group_size)

    @staticmethod
    def held_from(codes: Tensor, zeros: Tensor, scales: Tensor) -> Stored:
        """From codes 0 to 15 [K, N], zero points as codes [G, N] and scales [G, N]."""
        return {
            "weight_packed": pack_int4((codes - OFFSET).to(torch.int8).T.contiguous()),
            "weight_scale": scales.to(torch.float32).T.contiguous(),
            "weight_zero_point": (zeros - OFFSET).to(torch.int8).T.contiguous(),
        }

    def codes_of(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes 0 to 15 int32 [K, N], zero points [G, N] and float16 scales [G, N] of a weight [N, K]."""
        tensors = self.held_as.hold(self.held_as.quantize(weight))
        codes = unpack_int4(tensors["weight_packed"], weight.shape[1]).to(torch.int32).T + OFFSET
        zeros = tensors["weight_zero_point"].to(torch.int32).T + OFFSET
        return codes, zeros, tensors["weight_scale"].T.to(torch.float16).contiguous()


# What decides how a weight is stored, for which no default is taken.
_SIZES = ("bits", "group_size")


def _nibbles(words: Tensor) -> Tensor:
    """int32 [A, B] to its eight nibbles, least significant first: uint8 [A, B, 8]."""
    nibbles: Tensor = unpack_nibbles(words).unflatten(-1, (-1, VALUES_PER_WORD))
    return nibbles


def _words(nibbles: Tensor) -> Tensor:
    """The reverse."""
    return pack_nibbles(nibbles.to(torch.uint8)).contiguous().view(torch.int32).squeeze(-1)


# Nibble i of a word is the output column with this number among its eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@register
class AwqFormat(_Transposed):
    """AWQ's `gemm`: `qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], `scales` [G, N]."""

    name = "awq"
    method = "awq"
    suffixes = ("qweight", "qzeros", "scales")
    rule = "substring"

    @classmethod
    def parse(cls, raw: Mapping[str, Any], field: str) -> AwqFormat:
        """Read AutoAWQ's object."""
        only = {"version": ("gemm", "GEMM", None), "zero_point": (True,), "do_fuse": (False, None)}
        read = ("quant_method", "bits", "group_size", "modules_to_not_convert", "kv_cache_scheme")
        refuse_unknown(raw, read, field, only=only, harmless=("backend", "fuse_max_seq_len", "exllama_config"))
        ignore = listed(raw, cls.rule, field, "modules_to_not_convert")
        require(raw, _SIZES, field)
        return cls.model_validate({"ignore": ignore, **{name: raw[name] for name in _SIZES}})

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as AutoAWQ writes it."""
        own = {"quant_method": "awq", "bits": 4, "group_size": self.group_size, "version": "gemm", "zero_point": True}
        return {**own, "modules_to_not_convert": list(self.ignore)}

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Eight output columns a word."""
        groups, words = columns // self.group_size, rows // VALUES_PER_WORD
        return (torch.int32, (columns, words)), (torch.int32, (groups, words)), (torch.float16, (groups, rows))

    def hold(self, stored: Stored) -> Stored:
        """See the module."""
        if "qweight" not in stored:
            return stored
        order = torch.tensor(_AWQ_ORDER).argsort()
        codes, zeros = (_nibbles(stored[name])[..., order].flatten(-2) for name in ("qweight", "qzeros"))
        return self.held_from(codes, zeros, stored["scales"])

    def quantize(self, weight: Tensor) -> Stored:
        """As `Int4ZeroFormat`, with scales in float16."""
        codes, zeros, scales = self.codes_of(weight)
        order = torch.tensor(_AWQ_ORDER)
        packed = (_words(nibbles.unflatten(-1, (-1, VALUES_PER_WORD))[..., order]) for nibbles in (codes, zeros))
        return dict(zip(self.suffixes, (*packed, scales), strict=True))


# How the values were found, and how transformers runs them.
_TOLD = (
    "sym", "meta", "static_groups", "damp_percent", "true_sequential", "dataset", "tokenizer", "quantizer",
    "model_seqlen", "batch_size", "use_exllama", "use_cuda_fp16", "exllama_config", "backend", "cache_block_outputs",
    "block_name_to_quantize", "module_name_preceding_first_block", "max_input_length", "pad_token_id",
)  # fmt: skip


@register
class GptqFormat(_Transposed):
    """GPTQ: `qweight` int32 [K / 8, N], `qzeros` int32 [G, N / 8], `scales` [G, N], `g_idx` int32 [K].

    `checkpoint_format` gptq stores zero points less one, gptq_v2 as they are.
    """

    name = "gptq"
    method = "gptq"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"

    @classmethod
    def parse(cls, raw: Mapping[str, Any], field: str) -> GptqFormat:
        """Read AutoGPTQ's or GPTQModel's object, of which `dynamic` may leave modules out."""
        only = {
            "desc_act": (False, True),  # a checkpoint's g_idx has the columns' order, and is refused unless it is ours
            "pack_dtype": ("int32", None),
            "lm_head": (False, None),
            "modules_in_block_to_quantize": (None,),
        }
        read = ("quant_method", "bits", "group_size", "checkpoint_format", "dynamic", "kv_cache_scheme")
        refuse_unknown(raw, read, field, only=only, harmless=_TOLD)
        rules = raw.get("dynamic") or {}
        if not isinstance(rules, Mapping) or not all(str(name).startswith("-:") for name in rules):
            raise ConfigError("expected rules that leave modules out (-:)", field=f"{field}.dynamic")
        ignore = module_list([f"re:{name[2:]}" for name in rules], cls.rule, f"{field}.dynamic")
        require(raw, _SIZES, field)
        own = (*_SIZES, "checkpoint_format")
        return cls.model_validate({"ignore": ignore, **{name: raw[name] for name in own if name in raw}})

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as GPTQModel writes it."""
        own = {"quant_method": "gptq", "bits": 4, "group_size": self.group_size, "desc_act": False}
        rules: dict[str, Any] = {f"-:{name.removeprefix('re:')}": {} for name in self.ignore}
        return {**own, "checkpoint_format": self.checkpoint_format, **({"dynamic": rules} if rules else {})}

    @property
    def _less(self) -> int:
        return 1 if self.checkpoint_format == "gptq" else 0

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Eight input columns a word, eight output columns a word of zero points."""
        groups = columns // self.group_size
        yield torch.int32, (columns // VALUES_PER_WORD, rows)
        yield torch.int32, (groups, rows // VALUES_PER_WORD)
        yield torch.float16, (groups, rows)
        yield torch.int32, (columns,)

    def hold(self, stored: Stored) -> Stored:
        """See the module."""
        if "qweight" not in stored:
            return stored
        codes = _nibbles(stored["qweight"]).transpose(1, 2).flatten(0, 1)
        zeros = _nibbles(stored["qzeros"]).flatten(-2) + self._less
        return self.held_from(codes, zeros, stored["scales"])

    def quantize(self, weight: Tensor) -> Stored:
        """As `Int4ZeroFormat`, with scales in float16."""
        codes, zeros, scales = self.codes_of(weight)
        packed = _words(codes.unflatten(0, (-1, VALUES_PER_WORD)).transpose(1, 2))
        if self._less and int(zeros.min()) < 1:
            raise ValueError("a zero point of 0, which checkpoint_format gptq has no code for")
        lesser = _words((zeros - self._less).unflatten(-1, (-1, VALUES_PER_WORD)))
        groups = torch.arange(weight.shape[1], dtype=torch.int32) // self.group_size
        return dict(zip(self.suffixes, (packed, lesser, scales, groups), strict=True))

    def contradiction(self, stored: Stored) -> tuple[str, str] | None:
        """Columns out of order (`desc_act`) pass the header checks."""
        expected = torch.arange(len(stored["g_idx"]), dtype=torch.int32) // self.group_size
        return None if torch.equal(stored["g_idx"], expected) else ("g_idx", "columns are not in their groups' order")
