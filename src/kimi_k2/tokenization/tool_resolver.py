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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex

PREFIXES = ("functions.", "functions_")
_INDEX = re.compile(r"(?P<name>.+)[:._]-?[0-9]+", re.DOTALL)
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
# Of a schema, words that say nothing of the arguments; `properties` and `required` where they are empty.
_SILENT = {"type", "title", "description", "properties", "required", "default", "examples", "$schema", "$id"}
# Schemas and arguments of strangers: a thread's seconds that they may take of one reply, and seconds of a pattern.
MAX_SECONDS, PATTERN_SECONDS = 2.0, 0.1


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
        self._any_name, self._seconds = tools is None, MAX_SECONDS
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
        found = {name for name, schema in self._schemas if self._takes(schema, parsed)}
        return Resolved(header.strip(), found.pop()) if len(found) == 1 else None

    def _takes(self, schema: Any, arguments: dict[str, Any]) -> bool:
        # A schema that says nothing tells no call from another tool's: among several it takes none with arguments.
        if arguments and len(self._names) > 1 and _says_nothing(schema):
            return False
        begun = time.thread_time()
        problem = schema_problem(arguments, schema, self._seconds)
        self._seconds -= time.thread_time() - begun
        return problem is None

    def _sanitised(self, text: str) -> str | None:
        """The only tool whose name a client wrote so, in letters that all APIs take."""
        wanted = set(_names_of(text))
        found = {name for name in self._names if _UNSAFE.sub("_", name) in wanted}
        return found.pop() if len(found) == 1 else None


def schema_problem(arguments: Any, schema: Any, seconds: float = MAX_SECONDS) -> str | None:
    """Why a tool's schema refuses arguments, in a few words; None if it takes them.

    Args:
        arguments: parsed JSON.
        schema: the tool's `parameters`, an object or a boolean, by JSON Schema 2020-12 whatever its `$schema` says;
            None and {} take any object. Nothing is fetched for it, and `unevaluatedItems` and
            `unevaluatedProperties`, whose check has no bound, are refused.
        seconds: of this thread's work, after which the check is given up.
    """
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    schema, kind = {"type": "object"} if schema in (None, {}) else schema, _validator()
    unusable, _CLOCK.end = "the tool's schema cannot be used", time.thread_time() + seconds
    itself = kind(kind.META_SCHEMA, registry=REGISTRY, format_checker=kind.FORMAT_CHECKER)
    try:
        if error := next(itself.iter_errors(schema), None):
            return f"{unusable}: {error.message[:200]}"
        error = next(kind(schema, registry=REGISTRY).iter_errors(arguments), None)
    except Exception as wrong:  # any: a reference may lead to what is no schema, and jsonschema takes it for one
        return f"{unusable}: {str(wrong)[:200] or type(wrong).__name__}"
    return None if error is None else f"arguments do not fit the schema: {error.message[:200]}"


_CLOCK = threading.local()


@cache
def _validator() -> Any:
    """jsonschema's, with a limit of time: no step of it takes longer than its schema and arguments are long."""
    from jsonschema import Draft202012Validator, ValidationError, validators

    def bounded(check: Callable[..., Iterable[ValidationError] | None]) -> Callable[..., Iterator[ValidationError]]:
        def run(*given: Any) -> Iterator[ValidationError]:
            if time.thread_time() > _CLOCK.end:
                raise TimeoutError("it takes too long")
            yield from check(*given) or ()

        return run

    def matches(wanted: str, text: str) -> bool:
        return regex.search(wanted, text, timeout=PATTERN_SECONDS) is not None

    def pattern(_: Any, wanted: str, instance: Any, __: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not matches(wanted, instance):
            yield ValidationError(f"{instance!r} does not match {wanted!r}")

    def by_pattern(validator: Any, wanted: dict[str, Any], instance: Any, _: Any) -> Iterator[ValidationError]:
        for name, value in instance.items() if isinstance(instance, dict) else ():
            for pattern, schema in wanted.items():
                if matches(pattern, name):
                    yield from validator.descend(value, schema, path=name)

    def additional(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        for name in instance.keys() - schema.get("properties", {}).keys() if isinstance(instance, dict) else ():
            if any(matches(pattern, name) for pattern in schema.get("patternProperties", ())):
                continue
            if wanted is False:
                yield ValidationError(f"Additional properties are not allowed ({name!r} was unexpected)")
            else:
                yield from validator.descend(instance[name], wanted, path=name)

    def unique(_: Any, wanted: bool, instance: Any, __: Any) -> Iterator[ValidationError]:
        if wanted and isinstance(instance, list) and len({*map(_frozen, instance)}) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")

    def refused(*_: Any) -> Iterator[ValidationError]:
        raise TimeoutError("unevaluatedItems and unevaluatedProperties are not supported")

    checks = Draft202012Validator.VALIDATORS | {
        "pattern": pattern, "patternProperties": by_pattern, "additionalProperties": additional, "uniqueItems": unique,
        "unevaluatedItems": refused, "unevaluatedProperties": refused,
    }  # fmt: skip
    made: Any = validators.extend(Draft202012Validator, {name: bounded(check) for name, check in checks.items()})  # type: ignore[no-untyped-call]
    own = made.evolve

    def evolve(self: Any, **changes: Any) -> Any:
        # For a schema with a `$schema` its own takes jsonschema's class of that name.
        if isinstance(schema := changes.get("schema"), dict):
            changes["schema"] = {name: value for name, value in schema.items() if name != "$schema"}
        return own(self, **changes)

    made.evolve = evolve
    return made


def _frozen(value: Any) -> Any:
    """What is equal and hashes alike exactly where JSON's values are the same; 1 is 1.0 and not true."""
    if isinstance(value, dict):
        return frozenset((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return (bool, value) if isinstance(value, bool) else value


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
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]:
            yield function["name"], function.get("parameters")
