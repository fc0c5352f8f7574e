"""Lexemes of a text whose token ids are known beside it.

A serving engine's text may lag behind its tokens (half a character, the beginning of a stop string) and may end before
them (at a stop string), so neither can be read alone: the text says what was written, the ids say which spellings of a
marker in it are markers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kimi_k2.tokenization.lexer import SPELLINGS, Lexeme, Marker, TextLexer

_NAMES = {marker.value: marker for marker in Marker}


@dataclass
class _Run:
    """Ordinary tokens, and the marker that ended them if one has come yet.

    Attributes:
        seen: how many spellings of markers the text of these tokens has shown.
        spelled: how many there are in it; None until somebody asks.
    """

    ids: list[int] = field(default_factory=list)
    marker: Marker | None = None
    seen: int = 0
    spelled: int | None = None


class AlignedLexer:
    """Cuts a growing text into lexemes; a spelling that no marker token stands for is text.

    Where no ids come at all, every spelling counts as its marker, as in `TextLexer`. Time is linear in text and ids.

    Attributes:
        has_ids: whether any ids have come.

    Args:
        marker_ids: the marker tokens of the vocabulary.
        decode: text of ordinary token ids.
    """

    def __init__(self, marker_ids: Mapping[int, Marker], decode: Callable[[list[int]], str]) -> None:
        self._marker_ids, self._decode = marker_ids, decode
        self._runs: deque[_Run] = deque([_Run()])
        self.has_ids = False
        self._cutter = TextLexer()
        self._pending: deque[tuple[str, bool]] = deque()

    def feed(self, text: str, ids: Sequence[int]) -> None:
        """Take what comes next; `lexemes` gives what is complete of it."""
        for token in ids:
            self.has_ids = True
            marker = self._marker_ids.get(token)
            if marker is None:
                self._runs[-1].ids.append(token)
            else:
                self._runs[-1].marker = marker
                self._runs.append(_Run())
        self._pending.extend(self._cutter.cut(text))

    def lexemes(self) -> Iterator[Lexeme]:
        """Complete lexemes, each taken out as it is yielded; no text among them is empty."""
        while self._pending:
            text, is_spelling = self._pending.popleft()
            marker = self._marker(text) if is_spelling else None
            yield text if marker is None else marker

    def flush(self) -> Iterator[Lexeme]:
        """What was held back, at the end of the text."""
        yield from self.lexemes()
        yield from self._cutter.flush()

    def rest(self) -> tuple[str, list[int]]:
        """Text and ids that no marker in the yielded lexemes has covered, for another lexer to begin with.

        Text that was yielded since the last marker is to be put back in front of this text: its ids are given again.
        """
        tail = "".join(str(lexeme) for lexeme in self._cutter.flush())
        text = "".join(piece for piece, _ in self._pending) + tail
        self._pending.clear()
        tokens = {marker: token for token, marker in self._marker_ids.items()}
        ids: list[int] = []
        for run in self._runs:
            ids += run.ids if run.marker is None else [*run.ids, tokens[run.marker]]
        self._runs = deque([_Run()])
        return text, ids

    def _marker(self, spelling: str) -> Marker | None:
        """The marker that the next spelling in the text stands for, which is then done with; None if it is text."""
        if not self.has_ids:
            return SPELLINGS[spelling]
        marker = _NAMES.get(spelling)
        if marker is None:
            return None
        run = self._runs[0]
        if run.marker is not None:
            if run.spelled is None:
                pieces = TextLexer().cut(self._decode(run.ids)) if run.ids else []
                run.spelled = sum(is_spelling and piece in _NAMES for piece, is_spelling in pieces)
            if run.seen >= run.spelled and run.marker is marker:
                self._runs.popleft()
                return marker
        run.seen += 1
        return None
