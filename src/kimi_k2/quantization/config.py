"""`quantization_config` of a checkpoint: FP8 128x128 blocks, or compressed-tensors INT4 groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from kimi_k2.errors import ConfigError


class Fp8BlockQuantization(BaseModel):
    """DeepSeek-style FP8: every Linear but lm_head and the router is e4m3 with one scale a block.

    `weight_block_size` is (output rows, input columns) of a block.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    quant_method: Literal["fp8"] = "fp8"
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[PositiveInt, PositiveInt] = (128, 128)

    def quantizes(self, module: str) -> bool:
        """Whether the Linear called `module` (no `.weight`, no prefix) is stored in this format."""
        return not (module in ("lm_head", "model.embed_tokens") or module.endswith(("norm", ".mlp.gate")))

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as Hugging Face writes it."""
        return self.model_dump() | {"weight_block_size": list(self.weight_block_size)}


DEFAULT_INT4_IGNORE = (
    "lm_head",
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)


class Int4GroupQuantization(BaseModel):
    """compressed-tensors `pack-quantized` INT4, symmetric, one scale a group along the input dimension.

    `ignore` lists exact module names, or regular expressions after `re:`, that stay unquantized.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    quant_method: Literal["compressed-tensors"] = "compressed-tensors"
    format: Literal["pack-quantized"] = "pack-quantized"
    num_bits: Literal[4] = 4
    group_size: PositiveInt = 32
    strategy: Literal["group"] = "group"
    symmetric: Literal[True] = True
    type: Literal["int"] = "int"
    dynamic: Literal[False] = False
    actorder: None = None
    ignore: tuple[str, ...] = DEFAULT_INT4_IGNORE

    def quantizes(self, module: str) -> bool:
        """Whether the Linear called `module` (no `.weight`, no prefix) is stored in this format."""
        if module == "model.embed_tokens" or module.endswith(("norm", ".mlp.gate")):
            return False
        return not any(
            re.match(pattern[3:], module) if pattern.startswith("re:") else pattern == module for pattern in self.ignore
        )

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as compressed-tensors writes it."""
        weights = {
            "num_bits": self.num_bits,
            "group_size": self.group_size,
            "strategy": self.strategy,
            "symmetric": self.symmetric,
            "type": self.type,
            "dynamic": self.dynamic,
            "actorder": self.actorder,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        return {
            "quant_method": self.quant_method,
            "format": self.format,
            "config_groups": {"group_0": group},
            "ignore": list(self.ignore),
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
        }


Quantization = Fp8BlockQuantization | Int4GroupQuantization


def parse_quantization(raw: Any, *, field: str = "quantization_config") -> Quantization:
    """Read a `quantization_config` or `compression_config` object.

    Raises:
        ConfigError: the object is of another method, or a member is missing, mistyped or unsupported.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected an object, got {type(raw).__name__}", field=field)
    method = raw.get("quant_method")
    try:
        if method == "fp8":
            block = raw.get("weight_block_size")
            if not isinstance(block, (list, tuple)):
                raise ConfigError("expected a list of two block sizes", field=f"{field}.weight_block_size")
            return Fp8BlockQuantization.model_validate({**raw, "weight_block_size": tuple(block)})
        # Older exports name the method only by its format.
        if method == "compressed-tensors" or (method is None and raw.get("format") == "pack-quantized"):
            return _parse_compressed_tensors(raw, field)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join([field, *(str(part) for part in first["loc"])])
        raise ConfigError(f"{first['msg']}, got {first['input']!r}", field=name) from None
    raise ConfigError(f"expected 'fp8' or 'compressed-tensors', got {method!r}", field=f"{field}.quant_method")


def _parse_compressed_tensors(raw: Mapping[str, Any], field: str) -> Int4GroupQuantization:
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConfigError("expected exactly one config group", field=f"{field}.config_groups")
    name, group = next(iter(groups.items()))
    where = f"{field}.config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ConfigError("expected an object of quantization arguments", field=f"{where}.weights")
    if group.get("input_activations") is not None:
        raise ConfigError("expected null (weight-only)", field=f"{where}.input_activations")
    if list(group.get("targets", ["Linear"])) != ["Linear"]:
        raise ConfigError(f"expected ['Linear'], got {group['targets']!r}", field=f"{where}.targets")
    weights = group["weights"]
    for key in ("num_bits", "group_size", "strategy", "symmetric"):
        if key not in weights:
            raise ConfigError("missing", field=f"{where}.weights.{key}")
    keys = ("num_bits", "group_size", "strategy", "symmetric", "type", "dynamic", "actorder")
    return Int4GroupQuantization.model_validate(
        {
            "format": raw.get("format", "pack-quantized"),
            "ignore": tuple(raw.get("ignore") or ()),
            **{key: weights[key] for key in keys if key in weights},
        }
    )
