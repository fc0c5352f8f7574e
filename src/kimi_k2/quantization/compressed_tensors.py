"""compressed-tensors' `quantization_config`: groups of modules with the arguments of their quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kimi_k2.config_fields import refuse_unknown
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.modules import module_list

_READ = ("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status")
_HARMLESS = ("global_compression_ratio", "version", "run_compressed")
_DENSE = {"format": "dense"}
_ONLY = {"sparsity_config": (None, {}, _DENSE), "transform_config": (None, {}), "moe_sparsity_config": (None,)}
_ARGUMENTS = ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "actorder", "block_structure")
# How the scales were found says nothing of what they are.
_OF_THE_QUANTIZER = ("observer", "observer_kwargs", "zp_dtype", "scale_dtype")


class Group(NamedTuple):
    """What one config group says.

    Attributes:
        field: its dotted name.
        weights: the weights' arguments.
        ignore: modules that stay unquantized.
    """

    field: str
    weights: Mapping[str, Any]
    ignore: tuple[str, ...]


def is_compressed_tensors(raw: Mapping[str, Any]) -> bool:
    """Whether the object is compressed-tensors'; older exports name the method only by its format."""
    method = raw.get("quant_method")
    return method == "compressed-tensors" or (method is None and raw.get("format") == "pack-quantized")


def parse_compressed_tensors(raw: Mapping[str, Any], field: str) -> Group:
    """Read the object, whose members are all obeyed or refused.

    Raises:
        ConfigError: naming the member.
    """
    refuse_unknown(raw, _READ, field, only=_ONLY, harmless=_HARMLESS)
    kind = raw.get("format", "pack-quantized")
    if kind != "pack-quantized":
        raise ConfigError(f"expected 'pack-quantized', got {kind!r:.100}", field=f"{field}.format")
    if raw.get("quantization_status") not in (None, "compressed"):
        raise ConfigError(
            f"expected 'compressed', got {raw['quantization_status']!r:.100}", field=f"{field}.quantization_status"
        )
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConfigError("expected exactly one config group", field=f"{field}.config_groups")
    name, group = next(iter(groups.items()))
    where = f"{field}.config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ConfigError("expected an object of quantization arguments", field=f"{where}.weights")
    only = {"output_activations": (None,), "format": (None, kind)}
    refuse_unknown(group, ("targets", "weights", "input_activations"), where, only=only, harmless=())
    if group.get("input_activations") is not None:
        raise ConfigError("expected null (weight-only)", field=f"{where}.input_activations")
    if group.get("targets", ["Linear"]) != ["Linear"]:
        raise ConfigError(f"expected ['Linear'], got {group['targets']!r}", field=f"{where}.targets")
    weights = group["weights"]
    for key in ("num_bits", "group_size", "strategy", "symmetric"):
        if key not in weights:
            raise ConfigError("missing", field=f"{where}.weights.{key}")
    only = {"block_structure": (None,)}
    refuse_unknown(weights, set(_ARGUMENTS) - set(only), f"{where}.weights", only=only, harmless=_OF_THE_QUANTIZER)
    return Group(where, weights, module_list(raw.get("ignore"), "compressed", f"{field}.ignore"))
