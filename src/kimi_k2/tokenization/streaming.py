"""What the streaming parsers share: splitting a growing text at markers that may be cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence


def find_marker(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Place and name of the first of `markers` in `text` at or after `start`."""
    found = [(place, marker) for marker in markers if (place := text.find(marker, start)) >= 0]
    return min(found) if found else None


def safe_length(text: str, markers: Sequence[str]) -> int:
    """How much of `text` can no longer be part of a marker, whatever follows."""
    longest = max(map(len, markers)) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)
