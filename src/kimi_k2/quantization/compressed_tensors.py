"""compressed-tensors' `quantization_config`: groups of modules with the arguments of their quantization.

A group may have a format of its own: attention in FP8 and experts in four bits, say.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import SerializeAsAny

from kimi_k2.config_fields import refuse_unknown, require, same
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.modules import listed, module_list, names_module
from kimi_k2.quantization.stored import StoredFormat, formats, named_errors, register, unquantized

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

    def holds(self, **arguments: Any) -> bool:
        """Whether the weights' arguments are these, those not named being absent, null or false."""
        wanted = {**_NOTHING, **arguments}
        return all(same(self.weights.get(name, _NOTHING.get(name)), value) for name, value in wanted.items())


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
    ignore = listed(raw, "compressed", field, "ignore")
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
    require(weights, ("num_bits", "strategy", "symmetric"), f"{where}.weights")
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


class CompressedFormat(StoredFormat, ABC):
    """A format that a group of compressed-tensors' config describes.

    Attributes:
        kinds: the group's `format`; the first is written.
        arguments: of the weights; fields of arguments' names are beside them. With a field `activations` a config may
            ask for them, which stay as they are; else that is refused.
    """

    method = "compressed-tensors"
    kinds: ClassVar[tuple[str, ...]]
    arguments: ClassVar[dict[str, Any]] = {}

    @classmethod
    def of_scheme(cls, scheme: Scheme) -> Self | None:
        """The format of the group; None if it is another.

        Raises:
            ConfigError: it is this one, with an argument that is not supported.
        """
        said = {**_NOTHING, **scheme.weights}
        own = {name: said[name] for name in _ARGUMENTS & set(cls.model_fields) & set(said)}
        if scheme.kind not in cls.kinds or not cls.describes(scheme, own):
            return None
        if scheme.weights.get("block_structure") is not None and "block_structure" not in own:
            raise ConfigError("expected null", field=f"{scheme.field}.weights.block_structure")
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        asked = {} if scheme.activations is None else {"activations": scheme.activations}
        if asked and "activations" not in cls.model_fields:
            raise ConfigError(f"expected null, got {scheme.activations}", field=f"{scheme.field}.input_activations")
        with named_errors(f"{scheme.field}.weights"):
            return cls.model_validate({"ignore": scheme.ignore, **asked, **fields})

    @classmethod
    def describes(cls, scheme: Scheme, own: dict[str, Any]) -> bool:
        """Whether a group of one of `kinds` is of this format; `own` are the arguments that are fields."""
        return scheme.holds(**own | cls.arguments)

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as compressed-tensors writes it."""
        fields = self.model_dump(mode="json")
        own = {name: value for name, value in fields.items() if name in _ARGUMENTS}
        weights = {"dynamic": False, **self.arguments, **own}
        activations = asked = fields.get("activations")
        if activations is not None:
            when, bits, _, strategy = activations.split()
            asked = {"num_bits": int(bits[2:]), "type": "float", "strategy": strategy, "dynamic": when == "dynamic"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": asked, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.kinds[0],
            "config_groups": {"group_0": group},
            "ignore": list(self.ignore),
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
        }


@register
class MixedFormat(StoredFormat):
    """Groups of modules, each stored in a format of its own; what no group names stays unquantized.

    Attributes:
        targets: of each group: names of modules and expressions, or `Linear` for all that no other names.
        members: their formats.
    """

    name = "mixed"
    method = "compressed-tensors"
    suffixes = ()
    added = ()

    targets: tuple[tuple[str, ...], ...] = ()
    members: tuple[SerializeAsAny[StoredFormat], ...] = ()

    @classmethod
    def parse(cls, raw: Mapping[str, Any], field: str) -> StoredFormat:
        """Read compressed-tensors' object; one group of all modules is a format by itself."""
        schemes = list(parse_schemes(raw, field))
        members = tuple(_format_of(scheme) for scheme in schemes)
        if [scheme.targets for scheme in schemes] == [("Linear",)]:
            return members[0]
        return cls(targets=tuple(scheme.targets for scheme in schemes), members=members, ignore=schemes[0].ignore)

    def of(self, module: str) -> StoredFormat:
        """The first group's that names it, else that of all Linears."""
        if not self.quantizes(module):
            return unquantized()
        whole = unquantized()
        for targets, member in zip(self.targets, self.members, strict=True):
            if targets == ("Linear",):
                whole = member
            elif names_module(targets, "compressed", module):
                return member
        return whole

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as compressed-tensors writes it."""
        configs = [member.to_hf_dict() for member in self.members]
        groups = {
            f"group_{number}": {
                **config["config_groups"]["group_0"],
                "targets": list(targets),
                "format": config["format"],
            }
            for number, (config, targets) in enumerate(zip(configs, self.targets, strict=True))
        }
        return {**configs[0], "format": "mixed-precision", "config_groups": groups}

    def shapes(self, *_: object) -> Any:
        """Not to be called: `of` gives a module's own format."""
        raise NotImplementedError

    dequantize = quantize = shapes  # type: ignore[assignment]


def _format_of(scheme: Scheme) -> StoredFormat:
    for candidate in formats().values():
        found = candidate.of_scheme(scheme) if issubclass(candidate, CompressedFormat) else None
        if found is not None:
            return found
    said = {name: scheme.weights.get(name) for name in ("type", "num_bits", "strategy", "group_size", "symmetric")}
    raise ConfigError(f"no format of this package: {scheme.kind!r:.100} with {said}", field=f"{scheme.field}.weights")
