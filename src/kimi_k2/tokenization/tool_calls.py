"""Grammar of Kimi-K2's tool calls over lexemes; `message` has the parser.

A section is SECTION_BEGIN (CALL_BEGIN id ARGUMENT_BEGIN arguments CALL_END)* SECTION_END. Out
of that grammar, nothing is lost but markers, and white space between the calls of a section:

- A call without a section around it is a call; text between or after calls is content.
- A call that is cut off, or that another marker ends, is kept as far as it came (`ToolCallEnd.complete` is False).
- Markers out of place are dropped. In arguments, those that cannot end a call are text.
- A call whose function nobody can tell is content without its markers: the id and the arguments.

Ids of tool calls: functions.NAME:INDEX as the model was trained on, and what it writes instead at times.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kimi_k2.tokenization.deltas import Content, Delta, ToolCallArguments, ToolCallEnd, ToolCallStart
from kimi_k2.tokenization.lexer import Lexeme, Marker

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
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        if not isinstance(parsed, dict):
            return None
        common = {name: len(parsed.keys() & parameters) for name, parameters in self._parameters.items()}
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


_THINK_TAGS = (Marker.THINK, Marker.THINK_END)


class _State(Enum):
    TEXT = auto()
    SECTION = auto()  # between the calls of a section
    HEADER = auto()  # a call's id
    ARGUMENTS = auto()  # of a call whose function is known
    HELD = auto()  # arguments that are to tell the function
    UNKNOWN = auto()  # arguments of a call whose function nobody can tell


class ToolCallMachine:
    """The grammar over lexemes: `push` each, then `finish` once.

    Args:
        tools: definitions of the request's tools, for ids without a name.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._names = ToolNames(tools)
        self._state = self._home = _State.TEXT
        self._header: list[str] = []
        self._held: list[Lexeme] = []
        self._gap: list[str] | None = []  # white space between calls, dropped unless text follows; None after text
        self._started = 0

    @property
    def started(self) -> int:
        """How many calls have been started."""
        return self._started

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._state not in (_State.TEXT, _State.SECTION)

    def push(self, lexeme: Lexeme) -> Iterator[Delta]:
        """Deltas that a lexeme completes; they do not depend on how the text between two markers is cut."""
        if isinstance(lexeme, str):
            yield from self._text(lexeme)
        elif lexeme in _THINK_TAGS or (lexeme is Marker.ARGUMENT_BEGIN and self._state is not _State.HEADER):
            if self._state is _State.ARGUMENTS:
                yield ToolCallArguments(self._started - 1, lexeme.value)
            elif self._state is _State.HELD:
                self._held.append(lexeme)
        elif lexeme is Marker.ARGUMENT_BEGIN:
            yield from self._begin_arguments()
        elif lexeme is Marker.CALL_END:
            if self.in_call:
                yield from self._end_call(complete=True)
                self._enter(self._home)
        else:
            if self.in_call:
                yield from self._end_call(complete=False)
                self._enter(self._home)
            if lexeme is Marker.CALL_BEGIN:
                self._home, self._header = self._state, []
                self._enter(_State.HEADER)
            else:
                self._enter(_State.SECTION if lexeme is Marker.SECTION_BEGIN else _State.TEXT)

    def finish(self) -> Iterator[Delta]:
        """Deltas at the end of the text."""
        if self.in_call:
            yield from self._end_call(complete=False)
        self._enter(_State.TEXT)

    def _enter(self, state: _State) -> None:
        self._state, self._gap = state, []

    def _text(self, text: str) -> Iterator[Delta]:
        if self._state is _State.HEADER:
            self._header.append(text)
        elif self._state is _State.HELD:
            self._held.append(text)
        elif self._state is _State.ARGUMENTS:
            yield ToolCallArguments(self._started - 1, text)
        elif self._state is not _State.SECTION or self._gap is None:
            yield Content(text)
        elif text.isspace():
            self._gap.append(text)
        else:
            yield Content("".join([*self._gap, text]))
            self._gap = None

    def _begin_arguments(self) -> Iterator[Delta]:
        header = "".join(self._header)
        resolved = self._names.from_id(header)
        if resolved is not None:
            self._enter(_State.ARGUMENTS)
            yield self._start(resolved)
        elif self._names.may_be_inferred(header):
            self._held = []
            self._enter(_State.HELD)
        else:
            self._enter(_State.UNKNOWN)
            yield Content(header)

    def _start(self, resolved: Resolved) -> ToolCallStart:
        self._started += 1
        return ToolCallStart(self._started - 1, resolved.id, resolved.name)

    def _end_call(self, *, complete: bool) -> Iterator[Delta]:
        if self._state is _State.ARGUMENTS:
            yield ToolCallEnd(self._started - 1, complete)
        elif self._state is _State.HEADER:
            yield Content("".join(self._header))
        elif self._state is _State.HELD:
            header = "".join(self._header)
            arguments = "".join(lexeme if isinstance(lexeme, str) else lexeme.value for lexeme in self._held)
            resolved = self._names.from_arguments(header, arguments)
            if resolved is None:
                yield Content("".join([header, *(lexeme for lexeme in self._held if isinstance(lexeme, str))]))
            else:
                yield self._start(resolved)
                yield ToolCallArguments(self._started - 1, arguments)
                yield ToolCallEnd(self._started - 1, complete)
