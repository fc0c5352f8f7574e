"""Parser of Kimi-K2's tool-call sections, for whole texts and for streams cut anywhere.

A section is SECTION_BEGIN (CALL_BEGIN id ARGUMENT_BEGIN arguments CALL_END)* SECTION_END, where an id has the form
functions.NAME:INDEX. What does not fit that grammar is content, to the letter; nothing is dropped but the markers of
well-formed calls and white space between them. Whole texts and streams give the same result, however they are cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kimi_k2.tokenization.special_tokens import ARGUMENT_BEGIN, CALL_BEGIN, CALL_END, SECTION_BEGIN, SECTION_END
from kimi_k2.tokenization.streaming import find_marker, safe_length

# The name may contain dots and colons: it is all between the prefix and the last colon. It is never empty.
CALL_ID = re.compile(r"\s*(?!functions\.:\d+\s*\Z)(?P<id>(?:functions\.)?(?P<name>[^\s<>]+):(?P<index>\d+))\s*")

# Long texts are parsed in chunks: what is left over is copied at each marker.
_CHUNK = 4096
_TEXT, _SECTION, _HEADER, _ARGUMENTS, _BAD_CALL = range(5)
_MARKERS = {
    _TEXT: (SECTION_BEGIN,),
    _SECTION: (CALL_BEGIN, SECTION_END),
    _HEADER: (ARGUMENT_BEGIN, CALL_BEGIN, CALL_END, SECTION_BEGIN, SECTION_END),
    _ARGUMENTS: (CALL_END, CALL_BEGIN, SECTION_BEGIN, SECTION_END),
    _BAD_CALL: (CALL_END, CALL_BEGIN, SECTION_BEGIN, SECTION_END),
}


@dataclass(frozen=True)
class Content:
    """Ordinary text for the user."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call whose id is known; `index` counts the calls that were started, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A call is complete."""

    index: int


@dataclass(frozen=True)
class ToolCallAbandoned:
    """A started call turned out malformed; its text comes back as Content."""

    index: int


Event = Content | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallAbandoned


@dataclass
class ToolCall:
    """A complete call: its id as the model wrote it, the function's name, the raw arguments (usually JSON)."""

    id: str
    name: str
    arguments: str


@dataclass
class ParsedMessage:
    """Content and complete tool calls of an assistant message."""

    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class ToolCallStream:
    """Incremental parser: `feed` text as it comes, then `flush` once.

    Args:
        stream_arguments: emit arguments as they arrive; otherwise a call's events come only when it is complete, so
            that no ToolCallAbandoned is ever needed.
    """

    def __init__(self, *, stream_arguments: bool = True) -> None:
        self._stream_arguments = stream_arguments
        self._state = _TEXT
        self._buffer = ""  # the end of the text, where a marker may be cut
        self._head: list[str] = []  # before it: a header, or text between calls, to be judged whole
        self._pending: list[str] = []  # the section so far, markers included, while none of its calls is complete
        self._loose: list[str] = []  # text between the calls of that section
        self._section_valid = False
        self._call: list[str] = []  # the current call's text, markers included
        self._started = 0
        self._held: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Events that this text completes."""
        return _merged(
            event for start in range(0, len(text), _CHUNK) for event in self._run(text[start : start + _CHUNK])
        )

    def flush(self) -> list[Event]:
        """Events at the end of the text: whatever was held back comes out."""
        return _merged(self._finish())

    def _run(self, text: str) -> Iterator[Event]:
        self._buffer += text
        while True:
            found = find_marker(self._buffer, _MARKERS[self._state])
            if found is None:
                ready = safe_length(self._buffer, _MARKERS[self._state])
                text, self._buffer = self._buffer[:ready], self._buffer[ready:]
                if self._state in (_SECTION, _HEADER):
                    self._head.append(text)
                else:
                    yield from self._plain(text)
                return
            place, marker = found
            text, self._buffer = self._take_head() + self._buffer[:place], self._buffer[place + len(marker) :]
            yield from self._at_marker(text, marker)

    def _take_head(self) -> str:
        head, self._head = "".join(self._head), []
        return head

    def _plain(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._state == _TEXT:
            yield Content(text)
            return
        self._call.append(text)
        if self._state == _ARGUMENTS:
            yield from self._emit(ToolCallArguments(self._started - 1, text))

    def _emit(self, event: Event) -> Iterator[Event]:
        if self._stream_arguments:
            yield event
        else:
            self._held.append(event)

    def _at_marker(self, text: str, marker: str) -> Iterator[Event]:
        if self._state == _TEXT:
            yield from self._plain(text)
            self._state, self._pending, self._loose, self._section_valid = _SECTION, [marker], [], False
        elif self._state == _SECTION:
            yield from self._between_calls(text)
            if marker == CALL_BEGIN:
                self._state, self._call = _HEADER, [marker]
            else:
                yield from self._end_section(marker)
        elif self._state == _HEADER and marker == ARGUMENT_BEGIN:
            self._call += [text, marker]
            match = CALL_ID.fullmatch(text)
            if match:
                self._state, self._started = _ARGUMENTS, self._started + 1
                yield from self._emit(ToolCallStart(self._started - 1, match["id"], match["name"]))
            else:
                self._state = _BAD_CALL
        elif marker == CALL_END and self._state == _ARGUMENTS:
            yield from self._plain(text)
            yield from self._complete_call()
        else:
            yield from self._plain_or_header(text)
            closing = marker if marker == CALL_END else ""
            yield from self._abandon_call(closing)
            if not closing:  # the marker that cut the call short means what it means in a section
                self._buffer = marker + self._buffer
                if marker == SECTION_BEGIN:
                    self._buffer = self._buffer[len(marker) :]
                    yield from self._between_calls(marker)

    def _plain_or_header(self, text: str) -> Iterator[Event]:
        if self._state == _HEADER:
            self._call.append(text)
        else:
            yield from self._plain(text)

    def _between_calls(self, text: str) -> Iterator[Event]:
        if not self._section_valid:
            self._pending.append(text)
            self._loose.append(text if text.strip() else "")
        elif text.strip():
            yield Content(text)

    def _complete_call(self) -> Iterator[Event]:
        yield from self._held
        self._held = []
        yield ToolCallEnd(self._started - 1)
        if self._loose:
            yield Content("".join(self._loose))
        self._pending, self._loose, self._section_valid, self._call = [], [], True, []
        self._state = _SECTION

    def _abandon_call(self, closing: str) -> Iterator[Event]:
        if self._state == _ARGUMENTS:
            if self._stream_arguments:
                yield ToolCallAbandoned(self._started - 1)
            else:
                self._held, self._started = [], self._started - 1
        self._state = _SECTION
        text, self._call = "".join(self._call) + closing, []
        yield from self._between_calls(text)

    def _end_section(self, marker: str) -> Iterator[Event]:
        if not self._section_valid:
            yield Content("".join([*self._pending, marker]))
        self._state, self._pending, self._loose = _TEXT, [], []

    def _finish(self) -> Iterator[Event]:
        rest, self._buffer = self._take_head() + self._buffer, ""
        if self._state in (_TEXT, _SECTION):
            text = rest
        else:
            self._call.append(rest)
            text = ""
            yield from self._abandon_call("")
        if self._state == _TEXT:
            if text:
                yield Content(text)
            return
        yield from self._between_calls(text)
        yield from self._end_section("")


def _merged(events: Iterator[Event]) -> list[Event]:
    """Neighbouring content joined, empty content dropped."""
    merged: list[Event] = []
    for event in events:
        if isinstance(event, Content):
            if not event.text:
                continue
            if merged and isinstance(merged[-1], Content):
                merged[-1] = Content(merged[-1].text + event.text)
                continue
        merged.append(event)
    return merged


def collect(events: list[Event]) -> ParsedMessage:
    """Fold a stream's events into the message they describe."""
    message = ParsedMessage()
    calls: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, Content):
            message.content += event.text
        elif isinstance(event, ToolCallStart):
            calls[event.index] = ToolCall(event.id, event.name, "")
        elif isinstance(event, ToolCallArguments):
            calls[event.index].arguments += event.text
        elif isinstance(event, ToolCallEnd):
            message.tool_calls.append(calls.pop(event.index))
        else:
            del calls[event.index]
    return message


def parse_tool_calls(text: str) -> ParsedMessage:
    """Parse a whole assistant message."""
    parser = ToolCallStream()
    return collect(parser.feed(text) + parser.flush())
