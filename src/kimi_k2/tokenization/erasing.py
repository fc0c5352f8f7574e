"""Content without markers where only text is known: also without those that come together when another is dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kimi_k2.tokenization.deltas import Content, Delta
from kimi_k2.tokenization.lexer import SPELLINGS

_BEGINNINGS = {spelling[:end] for spelling in SPELLINGS for end in range(1, len(spelling))}
_PIECES = re.compile(r"<?[^<]*")


class MarkerEraser:
    """Takes spellings of markers out of a message's content; all else passes as it is.

    `<|tool_call_` and `begin|>` around a marker that was dropped are a marker when put together. What may still become
    one is held back: beginnings of markers, each inside the one before it. Time is linear in the text.
    """

    def __init__(self) -> None:
        self._open: list[str] = []

    def push(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """The deltas, content without markers."""
        for delta in deltas:
            if not isinstance(delta, Content):
                yield delta
            elif text := "".join(map(self._passed, _PIECES.findall(delta.text))):
                yield Content(text)

    def finish(self) -> Iterator[Delta]:
        """What was held back, at the end of the message."""
        if self._open:
            yield Content("".join(self._open))
            self._open = []

    def _passed(self, piece: str) -> str:
        """What is no part of a marker, of a piece that has `<` as its first character or not at all."""
        if piece.startswith("<"):
            self._open.append("")
        for place, character in enumerate(piece):
            if not self._open:
                return piece[place:]
            begun = self._open[-1] + character
            if begun in SPELLINGS:
                self._open.pop()
            elif begun in _BEGINNINGS:
                self._open[-1] = begun
            else:
                held = "".join(self._open)
                self._open = []
                return held + piece[place:]
        return ""
