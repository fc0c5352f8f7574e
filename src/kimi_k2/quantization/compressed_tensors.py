"""compressed-tensors' `quantization_config`: groups of modules with the arguments of their quantization."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kimi_k2.config_fields import refuse_unknown, same
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.modules import module_list

_READ = ("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status")
_HARMLESS = ("global_compression_ratio", "version", "run_compressed")
_DENSE = {"format": "dense"}
_ONLY = {"sparsity_config": (None, {}, _DENSE), "transform_config": (None, {}), "moe_sparsity_config": (None,)}
_ARGUMENTS = {"num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "actorder", "block_structure"}
# How the scales were found, and in what dtype they were, says nothing of what is stored.
_OF_THE_QUANTIZER = ("observer", "observer_kwargs", "zp_dtype", "scale_dtype")
# Of the format of the whole file where each group has its own.
_MIXED = "mixed-precision"
_NOTHING: dict[str, Any] = {"group_size": None, "actorder": None, "block_structure": None, "dynamic": False}


class Scheme(NamedTuple):
    """What one config group says.

    Attributes:
        field: its dotted name.
        kind: its format: `pack-quantized`, `float-quantized`, `nvfp4-pack-quantized` ...
        targets: modules, or `Linear` for all.
        weights: the weights' arguments.
        activations: what is asked of activations, in words; None if they stay as they are.
        ignore: modules that stay unquantized.
    """

    field: str
    kind: str
    targets: tuple[str, ...]
    weights: Mapping[str, Any]
    activations: str | None
    ignore: tuple[str, ...]

    def name(self, argument: str) -> str:
        """The dotted name of one of the weights' arguments."""
        return f"{self.field}.weights.{argument}"

    def holds(self, **arguments: Any) -> bool:
        """Whether the weights' arguments are these, those not named being absent, null or false."""
        wanted = {**_NOTHING, **arguments}
        return all(same(self.weights.get(name, _NOTHING.get(name)), value) for name, value in wanted.items())


def is_compressed_tensors(raw: Mapping[str, Any]) -> bool:
    """Whether the object is compressed-tensors'; older exports name the method only by its format."""
    method = raw.get("quant_method")
    return method == "compressed-tensors" or (method is None and raw.get("format") == "pack-quantized")


def parse_schemes(raw: Mapping[str, Any], field: str) -> Iterator[Scheme]:
    """Read the object, whose members are all obeyed or refused, one config group at a time.

    Raises:
        ConfigError: naming the member.
    """
    refuse_unknown(raw, _READ, field, only=_ONLY, harmless=_HARMLESS)
    if raw.get("quantization_status") not in (None, "compressed"):
        raise ConfigError(
            f"expected 'compressed', got {raw['quantization_status']!r:.100}", field=f"{field}.quantization_status"
        )
    ignore = module_list(raw.get("ignore"), "compressed", f"{field}.ignore")
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("expected an object of config groups", field=f"{field}.config_groups")
    for name, group in groups.items():
        yield _scheme(group, f"{field}.config_groups.{name}", raw.get("format", "pack-quantized"), ignore, field)


def _scheme(group: Any, where: str, kind: Any, ignore: tuple[str, ...], field: str) -> Scheme:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ConfigError("expected an object of quantization arguments", field=f"{where}.weights")
    read = ("targets", "weights", "input_activations", "format")
    refuse_unknown(group, read, where, only={"output_activations": (None,)}, harmless=())
    own = group.get("format")
    if own is not None and own != kind and kind != _MIXED:
        raise ConfigError(f"is {own!r:.100} but {field}.format is {kind!r:.100}", field=f"{where}.format")
    kind = kind if own is None else own
    if not isinstance(kind, str) or kind == _MIXED:
        raise ConfigError(f"expected the name of a format, got {kind!r:.100}", field=f"{where}.format")
    targets = group.get("targets", ["Linear"])
    if targets != ["Linear"]:
        targets = module_list(targets, "compressed", f"{where}.targets")
    weights = group["weights"]
    for key in ("num_bits", "strategy", "symmetric"):
        if key not in weights:
            raise ConfigError("missing", field=f"{where}.weights.{key}")
    refuse_unknown(weights, _ARGUMENTS, f"{where}.weights", only={}, harmless=_OF_THE_QUANTIZER)
    activations = _activations(group.get("input_activations"), f"{where}.input_activations")
    return Scheme(where, kind, tuple(targets), weights, activations, ignore)


def _activations(raw: Any, field: str) -> str | None:
    """In words, what is asked of activations; they stay unquantized here, which only floats may ask for instead."""
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected an object or null, got {type(raw).__name__}", field=field)
    refuse_unknown(raw, _ARGUMENTS, field, only={}, harmless=_OF_THE_QUANTIZER)
    if raw.get("type") != "float" or raw.get("num_bits") not in (4, 8):
        actual = raw.get("num_bits"), raw.get("type")
        raise ConfigError(f"expected null, or floats of 8 or 4 bits, got {actual!r:.100}", field=field)
    return f"{'static' if raw.get('dynamic') is False else 'dynamic'} FP{raw['num_bits']} a {raw.get('strategy')}"


def _group(weights: Mapping[str, Any], activations: str | None) -> dict[str, Any]:
    asked = None
    if activations is not None:
        when, bits, _, strategy = activations.split()
        asked = {"num_bits": int(bits[2:]), "type": "float", "strategy": strategy, "dynamic": when == "dynamic"}
    return {"targets": ["Linear"], "weights": dict(weights), "input_activations": asked, "output_activations": None}


def config_of(
    kind: str, weights: Mapping[str, Any], ignore: tuple[str, ...], activations: str | None = None
) -> dict[str, Any]:
    """The content of a `quantization_config` of one group as compressed-tensors writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": _group(weights, activations)},
        "ignore": list(ignore),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }
