"""Text that knows which of its characters a chat template wrote itself.

A special token's name in a prompt may come from the template or from a message; the characters are the same. Here every
string that a template sees carries a byte for each character: 1 where the template's own source wrote it, 0 elsewhere.
The value is always what `str` makes of the operation; only the bytes beside it are ours. An operation that is not
listed here gives a plain `str`, all of whose characters count as somebody else's: what is lost is trust, never text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from markupsafe import Markup

# Conversions of `%`, and replacement fields of `format` without others inside.
_FIELD = re.compile(r"%(?:\(.*?\))?[^A-Za-z%]*[A-Za-z%]|\{\{|\}\}|\{[^{}]*\}")
# A character that the template wrote, seen through an operation of which only the result is known: code points of the
# last plane, which no standard uses, stand for those of the first.
_STAND_IN = 0x100000


class TracedText(str):
    """A string with the origin of each character; its methods do as those of `str`.

    Args:
        text: the characters.
        own: a byte for each, 1 where the template wrote it; None if it wrote none.
    """

    # Templates cannot read names that begin with an underscore.
    __slots__ = ("_own",)
    _own: bytes | None

    def __new__(cls, text: str = "", own: bytes | None = None) -> TracedText:
        made = super().__new__(cls, text)
        made._own = own
        return made

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        for place, character in enumerate(super().__iter__()):
            yield _part(self, character, place)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if self._own is None:
            return TracedText(text)
        return TracedText(text, self._own[key] if isinstance(key, slice) else bytes((self._own[key],)))

    def __add__(self, other: Any) -> str:
        if type(other) not in (str, TracedText):
            return NotImplemented
        return joined((self, other))

    def __radd__(self, other: Any) -> str:
        return joined((other, self)) if type(other) is str else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        text = super().__mul__(count)
        return TracedText(text, None if self._own is None else self._own * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return copied(str.__mod__, self, values)

    def join(self, values: Iterable[str]) -> str:
        parts = list(values)
        text = super().join(parts)
        between = [part for value in parts for part in (self, value)][1:]
        return TracedText(text, _owned(between))

    def replace(self, old: str, new: str, *count: SupportsIndex, **named: SupportsIndex) -> str:
        text = super().replace(old, new, *count, **named)
        if not old:
            return text
        pieces = self.split(old, *(count or named.values()))
        return TracedText(text, _owned([part for piece in pieces for part in (new, piece)][1:]))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._between(super().split(sep, maxsplit), sep, from_end=False)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._between(super().rsplit(sep, maxsplit), sep, from_end=True)

    def _between(self, pieces: list[str], sep: str | None, *, from_end: bool) -> list[str]:
        """The pieces of this text between separators, which are white space where there is no `sep`."""
        parts: list[str] = []
        if sep is None and from_end:  # a piece ends at the last character before the next that is no white space
            end = len(self)
            for piece in reversed(pieces):
                end = self.rfind(piece, 0, end)
                parts.append(_part(self, piece, end))
            return parts[::-1]
        start = 0
        for piece in pieces:
            start = self.find(piece, start) if sep is None else start
            parts.append(_part(self, piece, start))
            start += len(piece) + len(sep or "")
        return parts

    def splitlines(self, keepends: bool = False) -> list[str]:
        parts: list[str] = []
        start = 0
        for piece, line in zip(super().splitlines(keepends), super().splitlines(True), strict=True):
            parts.append(_part(self, piece, start))
            start += len(line)
        return parts

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._cut(super().partition(sep))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._cut(super().rpartition(sep))

    def _cut(self, pieces: tuple[str, str, str]) -> tuple[str, str, str]:
        first, middle, last = pieces
        return (
            _part(self, first, 0),
            _part(self, middle, len(first)),
            _part(self, last, len(first) + len(middle)),
        )

    def strip(self, chars: str | None = None, /) -> str:
        return _part(self, super().strip(chars), len(self) - len(super().lstrip(chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        text = super().lstrip(chars)
        return _part(self, text, len(self) - len(text))

    def rstrip(self, chars: str | None = None, /) -> str:
        return _part(self, super().rstrip(chars), 0)

    def removeprefix(self, prefix: str, /) -> str:
        text = super().removeprefix(prefix)
        return _part(self, text, len(self) - len(text))

    def removesuffix(self, suffix: str, /) -> str:
        return _part(self, super().removesuffix(suffix), 0)

    def upper(self) -> str:
        return self._recased(super().upper())

    def lower(self) -> str:
        return self._recased(super().lower())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def title(self) -> str:
        return self._recased(super().title())

    def swapcase(self) -> str:
        return self._recased(super().swapcase())

    def casefold(self) -> str:
        return self._recased(super().casefold())

    def _recased(self, text: str) -> str:
        # A character becomes one or more others, never none: at the same length each became one.
        return TracedText(text, self._own if len(text) == len(self) else None)

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return copied(str.center, self, width, fillchar)

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return copied(str.ljust, self, width, fillchar)

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return copied(str.rjust, self, width, fillchar)

    def expandtabs(self, tabsize: SupportsIndex = 8) -> str:
        return copied(str.expandtabs, self, tabsize)


class _TracedMarkup(Markup):
    """Text marked safe; what is made of it counts as somebody else's, but for its plain text."""

    __slots__ = ("_own",)
    _own: bytes | None

    def __str__(self) -> str:
        return TracedText(str.__str__(self), getattr(self, "_own", None))


def written(text: str) -> TracedText:
    """Text of the template's own."""
    return TracedText(text, b"\1" * len(text))


def traced(value: Any) -> Any:
    """Plain data with every string in it, keys too, traced to somebody else."""
    if isinstance(value, str):
        return TracedText(value)
    if isinstance(value, Mapping):
        return {traced(key): traced(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(traced(item) for item in value)
    return value


def joined(parts: Iterable[str]) -> str:
    """The parts one after the other."""
    parts = list(parts)
    return TracedText("".join(parts), _owned(parts))


def marked_safe(value: Any) -> Markup:
    """What Jinja's `safe` makes."""
    text = _TracedMarkup(value)
    text._own = getattr(value, "_own", None) if type(value) is TracedText else None
    return text


def own_spans(text: str) -> list[tuple[int, int]]:
    """Where the template wrote the text itself: begins and ends, ascending."""
    own = _own(text)
    return [] if own is None else [match.span() for match in re.finditer(b"\1+", own)]


def copied(operation: Callable[..., str], *arguments: Any, **named: Any) -> str:
    """The result of an operation that copies characters of its arguments and chooses none by what they are.

    It is done again on arguments in which other characters stand for the template's; where that gives the same but for
    the stand-ins, they show what the template wrote.
    """
    text = operation(*arguments, **named)
    if isinstance(text, Markup):
        return text
    try:
        seen = operation(*map(_stand_ins, arguments), **{name: _stand_ins(value) for name, value in named.items()})
    except Exception:  # a stand-in where a number is read
        return TracedText(text)
    read = "".join(chr(ord(character) - _STAND_IN) if character >= chr(_STAND_IN) else character for character in seen)
    if read != text:
        return TracedText(text)
    return TracedText(text, bytes(character >= chr(_STAND_IN) for character in seen))


def _stand_ins(value: Any) -> Any:
    if isinstance(value, TracedText):
        if value._own is None:
            return value
        fields = bytearray(len(value))
        for match in _FIELD.finditer(value):
            fields[match.start() : match.end()] = b"\1" * len(match[0])
        return "".join(
            chr(ord(character) + _STAND_IN)
            if own and not (field or character.isspace() or ord(character) > 0xFFFF)
            else character
            for character, own, field in zip(str.__str__(value), value._own, fields, strict=True)
        )
    if isinstance(value, Mapping):
        return {key: _stand_ins(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_stand_ins(item) for item in value)
    return value


def _own(text: str) -> bytes | None:
    return text._own if isinstance(text, (TracedText, _TracedMarkup)) else None


def _owned(parts: list[str]) -> bytes | None:
    if all(_own(part) is None for part in parts):
        return None
    return b"".join(_own(part) or bytes(len(part)) for part in parts)


def _part(text: TracedText, piece: str, start: int) -> TracedText:
    own = text._own
    return TracedText(piece, None if own is None else own[start : start + len(piece)])
