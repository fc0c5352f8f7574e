"""Which declared tool a call is for, by the request's contract; never a name that nobody declared.

An id that names a declared tool, in any of the forms below, is that tool. Any other id says nothing: the call is for
the one tool whose schema its arguments satisfy; where none or several do, it is no call.

| id | names |
|---|---|
| `functions.NAME:3`, `NAME:3` | NAME, as the model was trained: all before the last colon, dots and colons too |
| `functions.NAME`, `NAME` | NAME |
| `functions.NAME_3`, `NAME_3`, `NAME.3`, `functions.NAME:-1` | NAME: what the model writes at times |
| `functions_NAME_3` | NAME, whose other characters than `[A-Za-z0-9_-]` a client wrote as `_` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization.messages import function_of
from kimi_k2.tokenization.renderer import schema_problems

PREFIXES = ("functions.", "functions_")
_INDEX = re.compile(r"(?P<name>.+)[:._]-?[0-9]+", re.DOTALL)
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
# Of a schema, words that say nothing of the arguments; `properties` and `required` where they are empty.
_SILENT = {"type", "title", "description", "properties", "required", "default", "examples", "$schema", "$id"}


def name_of_id(text: str) -> str | None:
    """The function's name in an id of the trained form, with or without the prefix; None for any other text."""
    name, colon, index = text.strip().rpartition(":")
    index = index.strip()
    if not colon or not (index.isascii() and index.isdigit()):
        return None
    name = name.removeprefix(PREFIXES[0])
    return name if name and not re.search(r"[\s<>]", name) else None


@dataclass(frozen=True)
class Resolved:
    """A call's id and its function's name."""

    id: str
    name: str


class ToolResolver:
    """Finds the tool that a call's id, or failing that its arguments, means.

    Attributes:
        arguments_tell: whether there are tools to choose from by arguments.

    Args:
        tools: OpenAI-style definitions of the request; malformed ones are passed over, since a request's tools are
            checked where the prompt is made. None where nobody knows what was declared: then the trained forms of an
            id alone tell, and any name is taken.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._schemas: list[tuple[str, Any]] = list(_functions(tools or ()))
        self._any_name = tools is None
        self._names = {name for name, _ in self._schemas}
        self.arguments_tell = bool(self._schemas)

    def by_id(self, header: str) -> Resolved | None:
        """The tool that an id names by itself."""
        text = header.strip()
        if self._any_name:
            bare = re.fullmatch(r"functions_([A-Za-z0-9_-]+)_[0-9]+", text)
            name = bare[1] if bare else name_of_id(text)
            return None if name is None else Resolved(text, name)
        found = next((name for name in _names_of(text) if name in self._names), None) or self._sanitised(text)
        return None if found is None else Resolved(text, found)

    def by_arguments(self, header: str, arguments: str) -> Resolved | None:
        """The only tool whose schema takes a call's arguments, a JSON object."""
        try:
            parsed = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
        if not isinstance(parsed, dict):
            return None
        # A schema that says nothing tells no call from another tool's: among several it takes none with arguments.
        silent = bool(parsed) and len(self._names) > 1
        asked = [(name, schema) for name, schema in self._schemas if not (silent and _says_nothing(schema))]
        try:
            problems = schema_problems(parsed, [schema for _, schema in asked])
        except TokenizerError:  # it is not tried again: a reply may have many calls
            self._schemas.clear()
            return None
        found = {name for (name, _), problem in zip(asked, problems, strict=True) if problem is None}
        return Resolved(header.strip(), found.pop()) if len(found) == 1 else None

    def _sanitised(self, text: str) -> str | None:
        """The only tool whose name a client wrote so, in letters that all APIs take."""
        wanted = set(_names_of(text))
        found = {name for name in self._names if _UNSAFE.sub("_", name) in wanted}
        return found.pop() if len(found) == 1 else None


def schema_problem(arguments: Any, schema: Any) -> str | None:
    """Why a tool's schema refuses arguments, in a few words; None if it takes them.

    Args:
        arguments: parsed JSON.
        schema: the tool's `parameters`, an object or a boolean, by JSON Schema 2020-12 or the draft that a part of it
            names; None and {} take any object. Nothing is fetched for it.
    """
    try:
        return schema_problems(arguments, [schema])[0]
    except TokenizerError as wrong:
        return f"the tool's schema cannot be used: {wrong}"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _says_nothing(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return schema is None
    return schema.keys() <= _SILENT and not schema.get("properties") and not schema.get("required")


def _names_of(text: str) -> Iterator[str]:
    """What an id may mean, the trained form first."""
    if trained := name_of_id(text):
        yield trained
    bare = [text.removeprefix(prefix) for prefix in PREFIXES if text.startswith(prefix)] + [text]
    yield from bare
    yield from (found["name"].strip() for spelling in bare if (found := _INDEX.fullmatch(spelling)))


def _functions(tools: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Names and parameters."""
    for tool in tools:
        if (function := function_of(tool)) is not None:
            yield function["name"], function.get("parameters")
