"""A kernel and all that it calls, as source: functions by name, classes with all their methods."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

_OWN = ("nki", "neuronxcc", "nki_emulator", "builtins", "typing", "dataclasses", "enum", "collections")


@dataclass
class Part:
    """A function or class of a kernel.

    Attributes:
        node: its syntax tree, with the file's line numbers.
        file: where it stands.
        names: what names in it mean.
    """

    node: ast.FunctionDef | ast.ClassDef
    file: str
    names: Mapping[str, Any] = field(repr=False)


@cache
def gather(kernel: Callable[..., Any]) -> list[Part]:
    """The kernel first. What has no source, or belongs to NKI or Python, is left out."""
    parts: list[Part] = []
    seen: set[int] = set()
    work: list[Any] = [kernel]
    while work:
        item = inspect.unwrap(work.pop(0))
        if id(item) in seen or not _followed(item):
            continue
        seen.add(id(item))
        part = _read(item)
        if part is None:
            continue
        parts.append(part)
        work += references(part)
    return parts


def _followed(item: Any) -> bool:
    if not isinstance(item, FunctionType | type):
        return False
    root = (item.__module__ or "").partition(".")[0]
    return root not in _OWN


def _read(item: Any) -> Part | None:
    try:
        lines, first = inspect.getsourcelines(item)
        node = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return None
    ast.increment_lineno(node, first - 1)
    names = item.__globals__ if isinstance(item, FunctionType) else vars(sys.modules[item.__module__])
    return Part(node, str(inspect.getsourcefile(item)), names)


def references(part: Part) -> Iterator[Any]:
    """Functions and classes that a part names."""
    for node in ast.walk(part.node):
        if isinstance(node, ast.Name | ast.Attribute):
            referent = resolve(node, part.names)
            if isinstance(inspect.unwrap(referent), FunctionType | type) and not (
                isinstance(referent, type) and issubclass(referent, Enum)
            ):
                yield referent


def resolve(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name or a module's attribute means; None where that is known at run time alone."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        holder = resolve(node.value, names)
        if isinstance(holder, ModuleType | type):
            return vars(holder).get(node.attr)
    return None


def module_of(node: ast.expr, names: Mapping[str, Any]) -> str | None:
    """`language`, `isa` or `collectives` where a node is that module of NKI."""
    module = resolve(node, names)
    if isinstance(module, ModuleType):
        last = module.__name__.rpartition(".")[2]
        root = module.__name__.partition(".")[0]
        if root in ("nki", "nki_emulator") and last in ("language", "isa", "collectives"):
            return last
    return None
