"""What modelopt writes: `quant_algo` says how all Linears are stored, but those that a list leaves out.

Here with its FP8 e4m3 weights: one scale, one an output channel, or one a block of 128 x 128 (which has four
dimensions). Activations stay as they are: their static scales are left out.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from kimi_k2.config_fields import refuse_unknown
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.fp8_block import Fp8BlockFormat, block_grid
from kimi_k2.quantization.fp8_float import Fp8Format, Fp8RowFormat, Scaling
from kimi_k2.quantization.modules import listed
from kimi_k2.quantization.stored import RecastFormat, StoredFormat, formats, register

_READ = ("quant_method", "quant_algo", "ignore", "exclude_modules", "kv_cache_scheme", "config_groups")


class ModeloptFormat(StoredFormat, ABC):
    """A format that a `quant_algo` names.

    Attributes:
        algorithms: the names; a field `quant_algo` says which, where there are several.
        bits: of a value.
    """

    method = "modelopt"
    unused = ("input_scale",)
    rule = "glob"
    algorithms: ClassVar[tuple[str, ...]]
    bits: ClassVar[int]

    @classmethod
    def parse(cls, raw: Mapping[str, Any], field: str) -> Self | None:
        """Read modelopt's object, from config.json or hf_quant_config.json."""
        algorithm = str(raw.get("quant_algo")).upper()
        known = {
            name: format_
            for format_ in formats().values()
            if issubclass(format_, ModeloptFormat)
            for name in format_.algorithms
        }
        if algorithm not in known:
            expected = ", ".join(sorted(known))
            raise ConfigError(f"expected {expected}, got {raw.get('quant_algo')!r:.100}", field=f"{field}.quant_algo")
        if known[algorithm] is not cls:
            return None
        groups = (getattr(cls, "group_size", None), None)
        only: dict[str, tuple[Any, ...]] = {
            "group_size": groups,
            "kv_cache_quant_algo": (None, "FP8"),
            "quantized_layers": (None, {}),
        }
        refuse_unknown(raw, _READ, field, only=only, harmless=("producer", "version"))
        cls._check_groups(raw.get("config_groups"), groups, f"{field}.config_groups")
        ignore = listed(raw, cls.rule, field, "ignore", "exclude_modules")
        return cls.model_validate({"ignore": ignore, "quant_algo": algorithm})

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as modelopt writes it."""
        said = {"quant_method": "modelopt", "quant_algo": getattr(self, "quant_algo", self.algorithms[0])}
        return {**said, **({"group_size": self.group} if self.group > 1 else {}), "ignore": list(self.ignore)}

    @classmethod
    def _check_groups(cls, groups: Any, sizes: tuple[Any, ...], field: str) -> None:
        """modelopt repeats in compressed-tensors' words what `quant_algo` says."""
        if groups is None:
            return
        if not isinstance(groups, Mapping) or len(groups) != 1:
            raise ConfigError("expected one config group of all Linears", field=field)
        name, group = next(iter(groups.items()))
        where = f"{field}.{name}"
        if not isinstance(group, Mapping):
            raise ConfigError(f"expected an object, got {type(group).__name__}", field=where)
        only = {"targets": (["Linear"],), "output_activations": (None,)}
        refuse_unknown(group, ("weights", "input_activations"), where, only=only, harmless=())
        dynamic = (False, True, "local")
        args = {"num_bits": (cls.bits,), "type": ("float",), "group_size": sizes, "dynamic": dynamic}
        for holder in ("weights", "input_activations"):
            if group.get(holder) is not None:
                refuse_unknown(group[holder], (), f"{where}.{holder}", only=args, harmless=())


@register
class ModeloptFp8Format(RecastFormat, Fp8Format, ModeloptFormat):
    """`weight` e4m3 [rows, columns] and `weight_scale` float32; held with a scale a row, or as DeepSeek's blocks."""

    name = "modelopt-fp8"
    algorithms = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
    bits = 8

    quant_algo: Literal["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"] = "FP8"

    @property
    def held_as(self) -> Fp8BlockFormat | Fp8RowFormat:
        """DeepSeek's form of blocks, or compressed-tensors' of channels."""
        return Fp8BlockFormat() if self.quant_algo == "FP8_PB_WO" else Fp8RowFormat()

    def scaled(self, rows: int, columns: int) -> Scaling:
        """All, with scales []; each row, [rows]; or each block, [blocks of rows, 1, blocks of columns, 1]."""
        if self.quant_algo == "FP8":
            return (rows, columns), ()
        if self.quant_algo == "FP8_PER_CHANNEL_PER_TOKEN":
            return (1, columns), (rows,)
        down, across = block_grid((rows, columns), (128, 128))
        return (128, 128), (down, 1, across, 1)
