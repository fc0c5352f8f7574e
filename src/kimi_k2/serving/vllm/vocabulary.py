"""What the parsers ask of the tokenizer that vLLM holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_k2.tokenization.aligned import AlignedLexer
from kimi_k2.tokenization.lexer import Marker


def marker_ids(vocabulary: Mapping[str, int]) -> dict[int, Marker]:
    """The marker tokens that a vocabulary has; members of the family without reasoning lack two."""
    return {vocabulary[marker.value]: marker for marker in Marker if marker.value in vocabulary}


def aligned_lexer(tokenizer: Any, vocabulary: Mapping[str, int]) -> AlignedLexer:
    """A lexer for one reply."""

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text

    return AlignedLexer(marker_ids(vocabulary), decode)
