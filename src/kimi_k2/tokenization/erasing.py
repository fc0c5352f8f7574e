"""Removes markers from content where only text is known, also those that form when one between them is removed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kimi_k2.tokenization.deltas import Content, Delta
from kimi_k2.tokenization.lexer import SPELLINGS

_BEGINNINGS = sorted({spelling[:end] for spelling in SPELLINGS for end in range(1, len(spelling))})
_NUMBERS = {beginning: number for number, beginning in enumerate(_BEGINNINGS)}
_PIECES = re.compile(r"<?[^<]*")
# Beginnings of a block, of which text is made at a time: a reference takes eight times the memory of a number.
_BLOCK = 512


class MarkerEraser:
    """Takes spellings of markers out of a message's content; all else passes as it is.

    `<|tool_call_` and `begin|>` around a marker that was dropped are a marker when put together. What may still become
    one is held back: beginnings of markers, each inside the one before it, a byte each. Time is linear in the text.
    """

    def __init__(self) -> None:
        self._open = bytearray()

    def push(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """The deltas, content without markers."""
        for delta in deltas:
            if not isinstance(delta, Content):
                yield delta
            elif text := "".join(self._passed(match[0]) for match in _PIECES.finditer(delta.text)):
                yield Content(text)

    def finish(self) -> Iterator[Delta]:
        """What was held back, at the end of the message."""
        yield from map(Content, self._held())

    def _held(self) -> Iterator[str]:
        """What is held back, from its beginning, no longer held."""
        held, self._open = self._open, bytearray()
        for first in range(0, len(held), _BLOCK):
            yield "".join(_BEGINNINGS[number] for number in held[first : first + _BLOCK])

    def _passed(self, piece: str) -> str:
        """What is no part of a marker, of a piece that has `<` as its first character or not at all."""
        first = 0
        if piece.startswith("<"):
            self._open.append(_NUMBERS["<"])
            first = 1
        for index in range(first, len(piece)):
            if not self._open:
                return piece[index:]
            begun = _BEGINNINGS[self._open[-1]] + piece[index]
            if begun in SPELLINGS:
                self._open.pop()
            elif begun in _NUMBERS:
                self._open[-1] = _NUMBERS[begun]
            else:
                return "".join(self._held()) + piece[index:]
        return ""
