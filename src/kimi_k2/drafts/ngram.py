"""Prompt lookup (Saxena 2023, as vLLM's `ngram`): what followed the last tokens when they stood there before."""

from __future__ import annotations

from collections.abc import Sequence

# Tokens that must agree: as many as there are of these, the most first.
MOST, LEAST = 4, 1


def lookup(tokens: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens that followed the latest earlier place of the longest of the last n-grams.

    Args:
        tokens: prompt and reply so far.
        count: tokens wanted.
    """
    held = list(tokens)
    for width in range(min(MOST, len(held) - 1), LEAST - 1, -1):
        ending = held[-width:]
        for start in range(len(held) - width - 1, -1, -1):
            if held[start + width - 1] == ending[-1] and held[start : start + width] == ending:
                return held[start + width : start + width + count]
    return []
