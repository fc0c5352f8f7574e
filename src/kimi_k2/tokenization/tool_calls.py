"""Grammar of Kimi-K2's tool calls over lexemes; `message` has the parser.

A section is SECTION_BEGIN (CALL_BEGIN id ARGUMENT_BEGIN arguments CALL_END)* SECTION_END. Out
of that grammar, nothing is lost but markers, and white space between the calls of a section:

- A call without a section around it is a call; text between or after calls is content.
- A call that is cut off, or that another marker ends, is kept as far as it came (`ToolCallEnd.complete` is False).
- Markers out of place are dropped. In arguments, those that cannot end a call are text.
- A call whose function nobody can tell (`tool_resolver`) is content without its markers: the id and the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from kimi_k2.tokenization.deltas import Content, Delta, ToolCallArguments, ToolCallEnd, ToolCallStart
from kimi_k2.tokenization.lexer import Lexeme, Marker
from kimi_k2.tokenization.tool_resolver import Resolved, ToolResolver

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

    Attributes:
        started: how many calls have been started.

    Args:
        tools: definitions of the request's tools, see `ToolResolver`.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._resolver = ToolResolver(tools)
        self._state = self._home = _State.TEXT
        self._header: list[str] = []
        self._held: list[Lexeme] = []
        self._gap: list[str] | None = []  # white space between calls, dropped unless text follows; None after text
        self.started = 0

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
                yield ToolCallArguments(self.started - 1, lexeme.value)
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
            yield ToolCallArguments(self.started - 1, text)
        elif self._state is not _State.SECTION or self._gap is None:
            yield Content(text)
        elif text.isspace():
            self._gap.append(text)
        else:
            yield Content("".join([*self._gap, text]))
            self._gap = None

    def _begin_arguments(self) -> Iterator[Delta]:
        header = "".join(self._header)
        resolved = self._resolver.by_id(header)
        if resolved is not None:
            self._enter(_State.ARGUMENTS)
            yield self._start(resolved)
        elif self._resolver.arguments_tell:
            self._held = []
            self._enter(_State.HELD)
        else:
            self._enter(_State.UNKNOWN)
            yield Content(header)

    def _start(self, resolved: Resolved) -> ToolCallStart:
        self.started += 1
        return ToolCallStart(self.started - 1, resolved.id, resolved.name)

    def _end_call(self, *, complete: bool) -> Iterator[Delta]:
        if self._state is _State.ARGUMENTS:
            yield ToolCallEnd(self.started - 1, complete)
        elif self._state is _State.HEADER:
            yield Content("".join(self._header))
        elif self._state is _State.HELD:
            header = "".join(self._header)
            arguments = "".join(lexeme if isinstance(lexeme, str) else lexeme.value for lexeme in self._held)
            resolved = self._resolver.by_arguments(header, arguments)
            if resolved is None:
                yield Content("".join([header, *(lexeme for lexeme in self._held if isinstance(lexeme, str))]))
            else:
                yield self._start(resolved)
                yield ToolCallArguments(self.started - 1, arguments)
                yield ToolCallEnd(self.started - 1, complete)
