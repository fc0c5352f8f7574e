"""Origins of characters: held to texts of distinct characters, where each of a result tells which one it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kimi_k2.tokenization.traced import TracedText, copied, joined, own_spans

OPERATIONS: list[Callable[[Any], Any]] = [
    lambda t: list(t), lambda t: t.split(), lambda t: t.rsplit(),
    lambda t: t.split(None, 1), lambda t: t.rsplit(None, 2), lambda t: t.split("--"), lambda t: t.split("--", 1),
    lambda t: t.rsplit("--", 1), lambda t: t.splitlines(), lambda t: t.splitlines(keepends=True), lambda t: t.strip(),
    lambda t: t.lstrip(" -"), lambda t: t.rstrip(), lambda t: t.strip(t[0] + t[-1]), lambda t: t.partition("--"),
    lambda t: t.rpartition("--"), lambda t: t.partition("?"), lambda t: t.rpartition("?"),
    lambda t: t.removeprefix(t[:2]), lambda t: t.removesuffix(t[-2:]), lambda t: t.upper(), lambda t: t.lower(),
    lambda t: t.title(), lambda t: t.capitalize(), lambda t: t.swapcase(),
    lambda t: t.casefold(), lambda t: t.replace("--", ""), lambda t: t.replace(t[3], t[4]),
    lambda t: t.replace("--", t[0], 1), lambda t: t * 2, lambda t: 2 * t[1:], lambda t: t + t[0], lambda t: t[-1] + t,
    lambda t: t[0].join([t[1], t[2:4], t[5:]]), lambda t: t.center(40, "."), lambda t: t.ljust(40),
    lambda t: t.rjust(40), lambda t: t.expandtabs(3),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_origins(number: int) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        letters = draw.sample(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZäöü汉字"[draw.randint(0, 1) * 26 :], 18
        )
        text = "".join(letter + draw.choice(["", "", "--", " ", "\n", "  "]) for letter in letters)
        is_own = {letter.casefold(): draw.random() < 0.5 for letter in letters}
        own = bytes(is_own.get(character.casefold(), False) for character in text)
        expected = OPERATIONS[number](text)
        found = OPERATIONS[number](TracedText(text, own))
        assert found == expected
        assert type(found) is not str
        for piece in found if isinstance(found, (list, tuple)) else [found]:
            owned = {place for begin, end in own_spans(piece) for place in range(begin, end)}
            assert owned == {i for i, character in enumerate(piece) if is_own.get(character.casefold(), False)}


def test_equal_pieces_are_told_apart() -> None:
    text = TracedText("x x  x", b"\0\0\1\0\0\0")
    assert [own_spans(piece) for piece in text.split()] == [[], [(0, 1)], []]
    assert [own_spans(piece) for piece in text.rsplit()] == [[], [(0, 1)], []]


def test_somebody_elses_stand_in_is_not_the_templates() -> None:
    """A character that stands for one of the template's while the copy is made, written in a message."""
    forged = "".join(chr(0x100000 + ord(character)) for character in "<|im_end|>")
    own = TracedText("ab", b"\1\1")
    assert own_spans(copied(str.center, joined([own, forged]), 20)) == []
    assert own_spans(copied(str.center, joined([own, "x"]), 4)) == [(0, 2)]


@pytest.mark.parametrize("text", ["ß", "ŉa", "İ", "ﬁ"])
def test_characters_that_become_several_are_nobodys(text: str) -> None:
    own = TracedText(text + "b", b"\0" * len(text) + b"\1")
    for recased in (own.upper(), own.lower(), own.title(), own.casefold()):
        assert len(recased) == len(own) or own_spans(recased) == []
