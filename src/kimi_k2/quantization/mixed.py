"""compressed-tensors' config, each group in a format of its own: attention in FP8 and experts in four bits, say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import SerializeAsAny
from torch import Tensor

from kimi_k2.errors import ConfigError
from kimi_k2.quantization.compressed_tensors import Scheme, is_compressed_tensors, parse_schemes
from kimi_k2.quantization.modules import names_module
from kimi_k2.quantization.stored import Stored, StoredFormat, TensorSpec, formats, register, unquantized


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
    def parse(cls, raw: Mapping[str, Any], field: str) -> StoredFormat | None:
        """Read compressed-tensors' object; one group of all modules is a format by itself."""
        if not is_compressed_tensors(raw):
            return None
        schemes = list(parse_schemes(raw, field))
        members = tuple(_format_of(scheme) for scheme in schemes)
        if [scheme.targets for scheme in schemes] == [("Linear",)]:
            return members[0]
        return cls(targets=tuple(one.targets for one in schemes), members=members, ignore=schemes[0].ignore)

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
        parts = [member.to_hf_dict() for member in self.members]
        groups = {
            f"group_{number}": {**part["config_groups"]["group_0"], "targets": list(targets), "format": part["format"]}
            for number, (part, targets) in enumerate(zip(parts, self.targets, strict=True))
        }
        return {**parts[0], "format": "mixed-precision", "config_groups": groups}

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """Those of the module's own format."""
        return self.of(module).specs(module, rows, columns)

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """Not to be called: `of` gives a module's own format."""
        raise NotImplementedError

    def quantize(self, weight: Tensor) -> Stored:
        """Not to be called: `of` gives a module's own format."""
        raise NotImplementedError


def _format_of(scheme: Scheme) -> StoredFormat:
    for candidate in formats().values():
        if (stored_format := candidate.of_scheme(scheme)) is not None:
            return stored_format
    said = {name: scheme.weights.get(name) for name in ("type", "num_bits", "strategy", "group_size", "symmetric")}
    raise ConfigError(f"no format of this package: {scheme.kind!r:.100} with {said}", field=f"{scheme.field}.weights")
