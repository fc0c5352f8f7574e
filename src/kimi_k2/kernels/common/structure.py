"""A launch's arguments as CUDA C++ defines them: one definition, read from the kernel's own source."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import INCLUDE, KERNELS, included

_TYPES: dict[str, Any] = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
_STRUCT = r"^struct {}(?: : ([\w:]+))? \{{$(.*?)^\}};"
_FIELD = re.compile(r"(?:const )?(?:unsigned )?(\w+)(\*?) (\w[\w, \[\]]*)")


def _passed(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


class Structure(ctypes.Structure):
    """What `structure` makes, of values in the fields' order, then by name; a name that is no field is refused.

    A tensor is set as its address and None as null.
    """

    __slots__ = ()

    def __init__(self, *first: Any, **others: Any) -> None:
        super().__init__(*map(_passed, first), **{name: _passed(value) for name, value in others.items()})


def _expanded(path: Path) -> str:
    """The file behind what it includes, without comments."""
    text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    return "".join(_expanded(included(name, path)) for name in INCLUDE.findall(text)) + text


@functools.cache
def _made(name: str, parent: type[Structure], fields: tuple[tuple[str, Any], ...]) -> type[Structure]:
    """One class for one structure, from whichever file it is read: ctypes nests no other class with its fields."""
    return type(name, (parent,), {"__slots__": (), "_fields_": fields})


def _read(text: str, name: str) -> type[Structure]:
    matches = list(re.finditer(_STRUCT.format(name), text, re.MULTILINE | re.DOTALL))
    if not matches:
        raise KernelError(f"there is no structure {name} of plain fields")
    base, body = matches[-1].groups()
    before, fields = text[: matches[-1].start()], []
    for statement in filter(None, map(str.strip, body.split(";"))):
        if (declared := _FIELD.fullmatch(statement)) is None:
            raise KernelError(f"{name}: {statement!r} is no declaration of plain fields")
        word, pointer, names = declared.groups()
        kind = ctypes.c_void_p if pointer else _TYPES.get(word) or _read(before, word)
        for field, size in re.findall(r"(\w+)(?:\[(\w+)\])?", names):
            count = [int(n) for n in re.findall(rf"constexpr int [^;]*\b{size} = (\d+)", before)] if size else []
            fields.append((field, kind * count[-1] if size else kind))
    parent = _read(before, base.rpartition(":")[2]) if base else Structure
    return _made(name, parent, tuple(fields))


@functools.cache
def structure(source: str, name: str) -> type[Structure]:
    """The ctypes structure of a C++ one: its base's fields, then its pointers, numbers, arrays and structures.

    Args:
        source: file in kernels/, as "router/csrc/gate.cuh".
        name: of the structure, without its namespace.

    Raises:
        KernelError: neither the file nor what it includes has it, or a field is of another kind.
    """
    return _read(_expanded(KERNELS / source), name)
