"""Ids of tool calls: functions.NAME:INDEX as the model was trained on, and what it writes instead at times.

| id | name |
|---|---|
| `functions.NAME:3`, `NAME:3` | NAME, all before the last colon: it may have dots and colons of its own |
| `functions_NAME_3` | NAME: clients hand ids back with only `[A-Za-z0-9_-]`, and the model writes on like that |
| `functions.NAME`, `NAME` | NAME, if a tool is called that |
| `3`, `call_6b0e7c24`, a UUID | of the tool whose parameters have most of the arguments' names, or of the only tool |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "functions."
_SANITISED = re.compile(r"functions_(?P<name>[A-Za-z0-9_-]+)_\d+")
# Ids of other models and of OpenAI's API, which come back from histories that another model has written.
_NAMELESS = re.compile(
    r"\d+|(?:call|fc|toolu|chatcmpl-tool)(?=\D*\d)[\w-]+|[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}",
    re.IGNORECASE | re.ASCII,
)


def name_of_id(text: str) -> str | None:
    """The function's name in an id of the trained form, with or without the prefix; None for any other text."""
    name, colon, index = text.strip().rpartition(":")
    index = index.strip()
    if not colon or not (index.isascii() and index.isdigit()):
        return None
    name = name.removeprefix(PREFIX)
    return name if name and not re.search(r"[\s<>]", name) else None


@dataclass(frozen=True)
class Resolved:
    """A call's id and its function's name."""

    id: str
    name: str


class ToolNames:
    """Finds the function that a call's id, or failing that its arguments, means.

    Args:
        tools: OpenAI-style definitions of the request; malformed ones are passed over, since a request's tools are
            checked where the prompt is made.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._parameters = dict(_functions(tools or ()))

    def from_id(self, header: str) -> Resolved | None:
        """The function that an id names by itself."""
        text = header.strip()
        name = name_of_id(text)
        if name is None:
            sanitised = _SANITISED.fullmatch(text)
            if sanitised:
                name = sanitised["name"]
            elif text.removeprefix(PREFIX) in self._parameters:
                name = text.removeprefix(PREFIX)
            elif len(self._parameters) == 1 and _NAMELESS.fullmatch(text):
                name = next(iter(self._parameters))
        return None if name is None else Resolved(text, name)

    def may_be_inferred(self, header: str) -> bool:
        """Whether an id has no name in it, and there are tools to choose from by the arguments."""
        return bool(self._parameters) and _NAMELESS.fullmatch(header.strip()) is not None

    def from_arguments(self, header: str, arguments: str) -> Resolved | None:
        """The tool whose parameters have most of the arguments' names; None if several have, or none has any."""
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        if not isinstance(given, dict):
            return None
        common = {name: len(given.keys() & parameters) for name, parameters in self._parameters.items()}
        most = max(common.values(), default=0)
        best = [name for name, count in common.items() if count == most]
        return Resolved(header.strip(), best[0]) if most and len(best) == 1 else None


def _functions(tools: Iterable[Any]) -> Iterable[tuple[str, frozenset[str]]]:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        yield function["name"], frozenset(properties if isinstance(properties, Mapping) else ())
