"""What a stored quantization is: a subclass of `StoredFormat` in a file of its own, which registers itself.

All modules of this package are searched for formats when the first is asked for; a format that lives elsewhere is known
once its module is imported.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer
from torch import Tensor

from kimi_k2 import quantization
from kimi_k2.config_fields import first_fault
from kimi_k2.errors import ConfigError
from kimi_k2.limits import BLOCK_SIDE
from kimi_k2.quantization.modules import Rule, names_module
from kimi_k2.quantization.rows import row_chunks

Stored = dict[str, Tensor]
Shape = tuple[torch.dtype, tuple[int, ...]]
BlockSide = Annotated[int, Field(ge=1, le=BLOCK_SIDE)]
# Linears that no format quantizes.
_FLOAT_MODULES = ("lm_head", "model.embed_tokens")
_FLOAT_ENDINGS = ("norm", ".mlp.gate")


class TensorSpec(NamedTuple):
    """Name, dtype and shape of one stored tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class StoredFormat(BaseModel, ABC):
    """How a checkpoint stores a Linear's [rows, columns] weight: as tensors `<module>.<suffix>`.

    Fields of a subclass are the arguments of the checkpoint's `quantization_config`. Every suffix starts with `weight`.

    Attributes:
        name: the project's name, as in `make-checkpoint --format`.
        method: `quant_method` in `quantization_config`; None for unquantized weights.
        suffixes: of the stored tensors, in file order.
        scales: those of `suffixes` whose values are scales: positive, or zero where all values are zero.
        implied: those of `suffixes` that say what shapes say already; ranks' files and models leave them out.
            Whether they are int32 or int64 says nothing either.
        unused: of tensors that may stand beside, for activations, which stay as they are here.
        rule: how `ignore` names modules.
        added: fields that came after the first ranks were converted.
        ignore: modules that stay unquantized.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    name: ClassVar[str]
    method: ClassVar[str | None] = None
    suffixes: ClassVar[tuple[str, ...]] = ("weight",)
    scales: ClassVar[tuple[str, ...]] = ()
    implied: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[tuple[str, ...]] = ()
    rule: ClassVar[Rule] = "compressed"
    added: ClassVar[tuple[str, ...]] = ("ignore",)

    ignore: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_defaults_of_added(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Converted ranks keep the digest that they had before there were such fields."""
        serialized: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        return {
            name: value
            for name, value in serialized.items()
            if name not in self.added or getattr(self, name) != fields[name].default
        }

    # -- quantization_config -------------------------------------------------------------------------

    @classmethod
    def parse(cls, raw: Mapping[str, Any], field: str) -> StoredFormat | None:
        """Read a `quantization_config` of this `method`; None if it is another format's.

        Raises:
            ConfigError, ValidationError: a member is missing, mistyped or unsupported; `field` is the object's name.
        """
        return None

    @abstractmethod
    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as Hugging Face's libraries write it."""

    def of(self, module: str) -> StoredFormat:
        """The format of the Linear called `module` (no `.weight`, no prefix)."""
        return self if self.quantizes(module) else unquantized()

    def quantizes(self, module: str) -> bool:
        """Whether the Linear called `module` (no `.weight`, no prefix) is stored in this format."""
        if module in _FLOAT_MODULES or module.endswith(_FLOAT_ENDINGS):
            return False
        return not names_module(self.ignore, self.rule, module)

    # -- tensors -------------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Columns of a row that share a scale: `group_size` where there is one."""
        return getattr(self, "group_size", 1)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the weight that share a scale; a rank's slice may not cut them."""
        return self.e4m3_block or (1, self.group)

    @abstractmethod
    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """Dtype and shape of the stored tensors of a Linear with a [rows, columns] weight, one a suffix."""

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """The stored tensors of a Linear with a [rows, columns] weight, one a suffix.

        Raises:
            ConfigError: its columns do not divide into groups.
        """
        if columns % self.group:
            where = "config_groups.*.weights." if self.method == "compressed-tensors" else ""
            raise ConfigError(
                f"{module} has {columns} input columns, which do not divide into groups of {self.group}",
                field=f"quantization_config.{where}group_size",
            )
        for suffix, (dtype, shape) in zip(self.suffixes, self.shapes(rows, columns), strict=True):
            yield TensorSpec(f"{module}.{suffix}", dtype, shape)

    @property
    def held_as(self) -> StoredFormat:
        """The format of what models and ranks hold."""
        return self

    def held(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """The tensors that models and ranks hold of a Linear: those of `hold`, each with two dimensions."""
        implied = tuple(f".{suffix}" for suffix in self.implied)
        yield from (spec for spec in self.specs(module, rows, columns) if not spec.name.endswith(implied))

    def cut(self, module: str, rows: int, columns: int, dim: int | None, parts: int) -> Iterator[TensorSpec]:
        """The stored tensors that ranks hold; each is cut along the weight's dimension `dim` into `parts`.

        Raises:
            ConfigError: a rank's slice would cut a block.
        """
        if dim is not None and parts > 1:
            share, block = (rows, columns)[dim] // parts, self.block[dim]
            if share % block:
                raise ConfigError(f"{module}: a rank's {share} of dimension {dim} cut a scale block of {block}")
        yield from self.held(module, rows, columns)

    # -- values --------------------------------------------------------------------------------------

    def hold(self, stored: Stored) -> Stored:
        """What models and ranks hold of a Linear's stored tensors, of the shapes of `held`."""
        return {suffix: tensor for suffix, tensor in stored.items() if suffix not in self.implied}

    @abstractmethod
    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The weight [..., rows, columns] in `dtype` from tensors by suffix, as stored or as held.

        Raises:
            ValueError: shapes contradict each other.
        """

    def dequantized_rows(self, stored: Stored) -> Iterator[tuple[slice, Tensor]]:
        """The float32 weight of one Linear, some rows at a time, with where they lie; the next overwrite them."""
        yield from row_chunks(self.dequantize(stored, torch.float32))

    @abstractmethod
    def quantize(self, weight: Tensor) -> Stored:
        """Stored tensors by suffix of a floating [rows, columns] weight."""

    @property
    def e4m3_block(self) -> tuple[int, int] | None:
        """`block` if FP8 values with a float32 scale a block are what is stored; None otherwise."""
        return None

    def e4m3_blocks(self, stored: Stored) -> tuple[Tensor, Tensor] | None:
        """(float8_e4m3fn weight, float32 scale a block) where there is an `e4m3_block`; None otherwise."""
        return None

    def draw(
        self, suffix: str, rows: int, columns: int, std: float, generator: Callable[[str], torch.Generator]
    ) -> Tensor:
        """One stored tensor of a random weight with standard deviation `std`.

        Args:
            suffix: which of the Linear's tensors.
            rows: of the weight.
            columns: of the weight.
            std: of the weight's values.
            generator: a random generator of the tensor with the suffix; that of "" is the same for all of a Linear.
        """
        return self.quantize(torch.randn(rows, columns, generator=generator("")).mul_(std))[suffix]

    # -- checks --------------------------------------------------------------------------------------

    def contradiction(self, stored: Stored) -> tuple[str, str] | None:
        """A suffix and what is wrong with it, if stored values contradict the shapes; None if none does."""
        return None

    def impossible_scales(self, stored: Stored) -> tuple[str, str] | None:
        """A suffix and what is wrong with its scales, if no quantizer would write them; None if none is."""
        for suffix in self.scales:
            scale = stored[suffix].to(torch.float32)
            if not scale.numel():
                continue
            low, high = (float(value) for value in scale.aminmax())
            if low < 0:
                return suffix, f"{int((scale < 0).sum())} of {scale.numel()} scales are negative"
            if high > _LARGEST_SCALE:
                count = int((scale > _LARGEST_SCALE).sum())
                return suffix, f"{count} of {scale.numel()} scales are above {_LARGEST_SCALE:.3g}"
            if low == 0:
                # With 1 for each zero scale and 0 for the others, what is left are values that zero scales wipe out.
                wiped = self.dequantize({**stored, suffix: (scale == 0).to(stored[suffix].dtype)}, torch.float32)
                if lost := int(wiped.count_nonzero()):
                    zeros = int((scale == 0).sum())
                    return suffix, f"{zeros} of {scale.numel()} scales are 0, and {lost} of their values are not"
        return None


# Times the largest FP8 value this is the largest BF16 number: a larger scale makes Inf of a finite weight.
_LARGEST_SCALE = torch.finfo(torch.bfloat16).max / torch.finfo(torch.float8_e4m3fn).max


class RecastFormat(StoredFormat, ABC):
    """A format whose values models and ranks hold in another, `held_as`, exactly.

    `hold` gives the same values as the other has them; what is held already is given back.
    """

    def held(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """The other format's."""
        return self.held_as.held(module, rows, columns)

    @property
    def block(self) -> tuple[int, int]:
        """The other format's."""
        return self.held_as.block

    @property
    def e4m3_block(self) -> tuple[int, int] | None:
        """The other format's."""
        return self.held_as.e4m3_block

    def e4m3_blocks(self, stored: Stored) -> tuple[Tensor, Tensor] | None:
        """The other format's."""
        return self.held_as.e4m3_blocks(self.hold(stored))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The other format's."""
        return self.held_as.dequantize(self.hold(stored), dtype)

    def dequantized_rows(self, stored: Stored) -> Iterator[tuple[slice, Tensor]]:
        """The other format's."""
        return self.held_as.dequantized_rows(self.hold(stored))


_REGISTERED: list[type[StoredFormat]] = []


def register(cls: type[StoredFormat]) -> type[StoredFormat]:
    """Class decorator: known by the class's `name`."""
    _REGISTERED.append(cls)
    return cls


@functools.cache
def _search() -> None:
    """Import this package's modules, which register their formats."""
    for module in pkgutil.iter_modules(quantization.__path__):
        importlib.import_module(f"{quantization.__name__}.{module.name}")


def _known() -> list[type[StoredFormat]]:
    """All formats, in the order of their modules' names."""
    _search()
    return sorted(_REGISTERED, key=lambda one: one.__module__)


def formats() -> Mapping[str, type[StoredFormat]]:
    """All formats that a Linear may be stored in, by name."""
    return {format_.name: format_ for format_ in _known() if format_.suffixes}


@contextmanager
def named_errors(field: str) -> Iterator[None]:
    """Turn what validation says of a field into a ConfigError with its whole name.

    Args:
        field: name of the object that is validated.
    """
    try:
        yield
    except ValidationError as error:
        fault = first_fault(error, None)
        raise ConfigError(fault.message, field=".".join(filter(None, (field, fault.field)))) from None


@functools.cache
def unquantized() -> StoredFormat:
    """The format of Linears that nothing quantizes."""
    return formats()["bf16"]()


def parse_quantization(raw: Any, *, field: str = "quantization_config") -> StoredFormat:
    """Read a `quantization_config` or `compression_config` object.

    Raises:
        ConfigError: the object is of another method, or a member is missing, mistyped or unsupported.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected an object, got {type(raw).__name__}", field=field)
    method = raw.get("quant_method")
    if method is None and raw.get("format") == "pack-quantized":  # as older exports say it
        method = "compressed-tensors"
    with named_errors(field):
        for candidate in _known():
            if candidate.method == method and (stored_format := candidate.parse(raw, field)) is not None:
                return stored_format
    known = " or ".join(sorted({repr(format_.method) for format_ in formats().values() if format_.method}))
    raise ConfigError(f"expected {known}, got {raw.get('quant_method')!r:.100}", field=f"{field}.quant_method")


def format_of(quantization: StoredFormat | None, module: str) -> StoredFormat:
    """The format of the Linear `module` in a checkpoint with that quantization."""
    return unquantized() if quantization is None else quantization.of(module)


@register
class UnquantizedFormat(StoredFormat):
    """One BF16 tensor; a checkpoint in this format has no `quantization_config`."""

    name = "bf16"

    def to_hf_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """`weight`."""
        return [(torch.bfloat16, (rows, columns))]

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The stored weight in `dtype`."""
        return stored["weight"].to(dtype)

    def quantize(self, weight: Tensor) -> Stored:
        """The weight rounded to BF16."""
        return {"weight": weight.to(torch.bfloat16)}
