"""What a kernel takes and gives, from one line: `x bf16[T,K], weight e4m3[N,K] -> out bf16[T,N]; K % 128 == 0`.

Left of the arrow are the tensors, on one device and contiguous. A dimension that is a name binds it, any other is
computed from those bound before it; `/` rounds up; `*S` binds all dimensions there. Behind a tensor:

- `?`: it may be None;
- `rows`: contiguous in the last dimension only; `rows16`: and every row begins at whole 16 bytes.

Dtypes are `bf16`, `f16`, `f32`, `e4m3`, `u8`, `i32`, `i64`, several joined by `|`; right of the arrow also the name of
an argument, whose dtype it is or has. Behind the semicolons are conditions on sizes and arguments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kimi_k2.errors import KernelError

DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
_TENSOR = re.compile(r"(\w+) ([\w|]+)\[([^\]]*)\](\?)?(?: (rows16|rows))?")
_NAMES: dict[str, Any] = {"__builtins__": {}, "min": min, "max": max, "len": len, **DTYPES}


class _RoundUp(ast.NodeTransformer):
    """a / b as -(-a // b)."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right))


def _compiled(text: str) -> CodeType:
    return compile(ast.fix_missing_locations(_RoundUp().visit(ast.parse(text, mode="eval"))), text, "eval")


@dataclass(frozen=True)
class Operand:
    """A tensor of a line.

    Attributes:
        text: of the line.
        name: of the argument or the result.
        dtype: words, not looked up yet.
        dims: a name that binds, or what computes the size.
        star: the first name binds all dimensions that the others leave.
        optional: may be None.
        layout: "" for contiguous, `rows` or `rows16`.
    """

    text: str
    name: str
    dtype: str
    dims: tuple[str | CodeType, ...]
    star: bool
    optional: bool
    layout: str

    def sizes(self, shape: tuple[int, ...]) -> list[tuple[Any, str | CodeType]] | None:
        """Sizes beside dimensions; None if there are more or fewer."""
        found: tuple[Any, ...] = shape
        if self.star and (lead := len(shape) - len(self.dims) + 1) >= 0:
            found = shape[:lead], *shape[lead:]
        return list(zip(found, self.dims, strict=True)) if len(found) == len(self.dims) else None

    def refusal(self, tensor: Tensor, known: dict[str, Any]) -> str | None:
        """What is wrong with a tensor; a dimension that nothing known gives is right."""
        sizes = self.sizes(tuple(tensor.shape))
        dtypes = [DTYPES[one] for one in self.dtype.split("|")]
        if sizes is None or tensor.dtype not in dtypes or any(_value(dim, known, size) != size for size, dim in sizes):
            return f"is {tensor.dtype} {list(tensor.shape)}"
        if not self.layout:
            return None if tensor.is_contiguous() else "is not contiguous"
        unit = 16 // tensor.element_size() if self.layout == "rows16" else 1
        starts = [tensor.storage_offset(), *(tensor.stride()[:-1] if tensor.numel() > tensor.shape[-1] else ())]
        whole = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
        return None if whole and not any(start % unit for start in starts) else f"has strides {tensor.stride()}"


def _value(dim: str | CodeType, known: Mapping[str, Any], otherwise: Any) -> Any:
    try:
        return known[dim] if isinstance(dim, str) else eval(dim, _NAMES, known)
    except (NameError, KeyError):
        return otherwise


def _operands(text: str) -> tuple[Operand, ...]:
    found = []
    for name, dtype, dims, optional, layout in _TENSOR.findall(text):
        sizes = [one.strip() for one in dims.split(",") if one.strip()]
        star = dims[:1] == "*"
        made = tuple(one if one.isidentifier() else _compiled(one) for one in (size.lstrip("*") for size in sizes))
        text = f"{dtype}[{dims}]{layout and ' ' + layout}"
        found.append(Operand(text, name, dtype, made, star, bool(optional), layout))
    return tuple(found)


class Line:
    """A parsed line."""

    def __init__(self, text: str) -> None:
        tensors, *conditions = text.split(";")
        given, _, made = tensors.partition("->")
        self.text, self.operands, self.results = text, _operands(given), _operands(made)
        self.conditions = [(condition.strip(), _compiled(condition.strip())) for condition in conditions]
        self._fits: dict[Hashable, bool] = {}

    def bind(self, values: Mapping[str, Any], *, part: bool = False) -> dict[str, Any]:
        """The arguments and the sizes by their names.

        Args:
            values: arguments by name.
            part: of the arguments some are not there, and what they decide is left out.

        Raises:
            KernelError: naming the tensor or the condition, and what was expected.
        """
        given = [(operand, values[operand.name]) for operand in self.operands if values.get(operand.name) is not None]
        for one in self.operands:
            if values.get(one.name) is None and not one.optional and not (part and one.name not in values):
                raise KernelError(f"{one.name} is None, expected {one.text}")
        sizes, device = dict(values), given[0][1].device
        for one, tensor in given:
            for size, dim in one.sizes(tuple(tensor.shape)) or ():
                if isinstance(dim, str):
                    sizes.setdefault(dim, size)
        for one, tensor in given:
            fault = one.refusal(tensor, sizes) or (None if tensor.device == device else f"is on {tensor.device}")
            if fault:
                known = ", ".join(f"{name} {size}" for name, size in sizes.items() if name[0].isupper())
                raise KernelError(f"{one.name} {fault}, expected {one.text} on {device}, here {known}")
        for text, code in self.conditions:
            try:
                true = eval(code, _NAMES, sizes)
            except NameError:  # of what is not there
                if not part:
                    raise
            else:
                self._hold(text, true, {name: sizes[name] for name in code.co_names if name in sizes})
        return {**sizes, "device": device}

    def fits(self, **values: Any) -> bool:
        """Whether some of the arguments are what the kernel takes."""
        key, found = recall(self._fits, (*values, *values.values()))
        if found is None:
            try:
                self.bind(values, part=True)
                found = True
            except KernelError:
                found = False
            remember(self._fits, key, found)
        return found

    @staticmethod
    def _hold(text: str, true: bool, names: Mapping[str, Any]) -> None:
        if not true:
            given = ", ".join(f"{name} {value}" for name, value in names.items() if not isinstance(value, Tensor))
            raise KernelError(f"{given}: expected {text}")

    def made(self, sizes: Mapping[str, Any]) -> dict[str, Result]:
        """The results by their names."""
        results = {}
        for result in self.results:
            found = [_value(dim, sizes, None) for dim in result.dims]
            shape = (*found[0], *found[1:]) if result.star else tuple(found)
            kind = DTYPES.get(result.dtype) or sizes[result.dtype]
            results[result.name] = Result(shape, kind.dtype if isinstance(kind, Tensor) else kind, sizes["device"])
        return results


T = TypeVar("T")


class Result(NamedTuple):
    """What is made for a kernel to write."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """The tensor, unwritten."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


MOST = 4096  # answers that are remembered, as asking takes a launch's time


def recall(answers: Mapping[Hashable, T], arguments: Iterable[Any]) -> tuple[Hashable, T | None]:
    """All that a line can see of arguments, and the answer for it; None for sizes that torch.compile keeps open."""
    key = tuple(
        [
            (argument.shape, argument.dtype, argument.stride(), argument.device, argument.storage_offset() % 16)
            if isinstance(argument, Tensor)
            else tuple(argument)
            if isinstance(argument, list)
            else argument
            for argument in arguments
        ]
    )
    try:
        return key, answers.get(key)
    except TypeError:
        return None, None


def remember(answers: dict[Hashable, T], key: Hashable, answer: T) -> None:
    """Keep an answer, for some time."""
    if len(answers) >= MOST:
        answers.clear()
    if key is not None:
        answers[key] = answer
