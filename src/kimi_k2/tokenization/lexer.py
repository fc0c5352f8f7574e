"""Text cut into lexemes: plain text, and the markers that structure a Kimi message.

Only token ids tell a marker from text that is spelled like one: a model that quotes `<|tool_call_end|>` in a file it
writes does so with ordinary tokens. `AlignedLexer` sees both and tells them apart; `TextLexer` takes both for markers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from kimi_k2.tokenization import special_tokens as names


class Marker(Enum):
    """A special token that structures a message; the value is its text."""

    THINK = names.THINK
    THINK_END = names.THINK_END
    SECTION_BEGIN = names.SECTION_BEGIN
    SECTION_END = names.SECTION_END
    CALL_BEGIN = names.CALL_BEGIN
    ARGUMENT_BEGIN = names.ARGUMENT_BEGIN
    CALL_END = names.CALL_END


Lexeme = str | Marker

# Models sometimes spell the section's markers in the singular, with ordinary tokens.
SPELLINGS = {
    **{marker.value: marker for marker in Marker},
    "<|tool_call_section_begin|>": Marker.SECTION_BEGIN,
    "<|tool_call_section_end|>": Marker.SECTION_END,
}
_FOUND = re.compile("|".join(map(re.escape, SPELLINGS)))
_LONGEST = max(map(len, SPELLINGS))


class TextLexer:
    """Splits a growing text at markers that may be cut anywhere.

    What may be the beginning of a marker is held back until more comes: fewer characters than a marker has. Time is
    linear in the text, whatever the pieces.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> list[Lexeme]:
        """Lexemes that this text completes; no text among them is empty."""
        return [SPELLINGS[piece] if is_spelling else piece for piece, is_spelling in self.cut(text)]

    def cut(self, text: str) -> list[tuple[str, bool]]:
        """Pieces that this text completes, none empty, and of each whether it is spelled like a marker."""
        text = self._held + text
        pieces: list[tuple[str, bool]] = []
        end = 0
        for match in _FOUND.finditer(text):
            pieces += [(text[end : match.start()], False), (match[0], True)]
            end = match.end()
        # A marker has one "<", its first character: only the last one of the text can begin a cut marker.
        opening = text.rfind("<", max(end, len(text) - _LONGEST + 1))
        is_cut = opening >= 0 and any(spelling.startswith(text[opening:]) for spelling in SPELLINGS)
        ready = opening if is_cut else len(text)
        pieces.append((text[end:ready], False))
        self._held = text[ready:]
        return [piece for piece in pieces if piece[0]]

    def flush(self) -> list[Lexeme]:
        """What was held back, at the end of the text."""
        tail, self._held = self._held, ""
        return [tail] if tail else []


def marker_ids(vocabulary: Mapping[str, int]) -> dict[int, Marker]:
    """The marker tokens that a vocabulary has; members of the family without reasoning lack two."""
    return {vocabulary[marker.value]: marker for marker in Marker if marker.value in vocabulary}
