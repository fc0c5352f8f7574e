"""Text and token ids beside each other, the text late and in other pieces: markers are those of the ids alone."""

from __future__ import annotations

import random

import pytest
from parser_cases import call, section
from vllm_parsing import TOKENIZER, tokens_and_text

from kimi_k2.tokenization.aligned import AlignedLexer
from kimi_k2.tokenization.lexer import Lexeme, Marker, TextLexer, marker_ids
from kimi_k2.tokenization.special_tokens import CALL_END, SECTION_BEGIN, THINK, THINK_END

IDS = marker_ids(TOKENIZER.special_tokens)
SINGULAR = "<|tool_call_section_begin|>"

# Segments, true for markup: special tokens where spelled; else ordinary tokens.
TEXTS: dict[str, list[tuple[str, bool]]] = {
    "a message": [(f"{THINK}Hm.{THINK_END}Now: {section(call(), call('functions.g:1'))}", True)],
    "a quoted end": [(SECTION_BEGIN + "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", True),
                     ('{"text": "' + CALL_END + '"}', False), (CALL_END, True)],
    "only quotes": [(f"{THINK} and {CALL_END}{CALL_END} are markers", False)],
    "quotes between markers": [(THINK, True), (f"{THINK_END}{THINK}", False), (THINK_END, True), (THINK_END, False),
                               (CALL_END, True), (CALL_END, False), (CALL_END, True)],
    "the singular": [(SINGULAR, False), (SECTION_BEGIN, True), (SINGULAR, False)],
    "halves": [("<|tool_calls_", False), (SECTION_BEGIN, True), ("<", False), (CALL_END, True), ("é 漢 🙂 <", False)],
}  # fmt: skip


def joined(lexemes: list[Lexeme]) -> list[Lexeme]:
    """Neighbouring texts as one."""
    result: list[Lexeme] = []
    for lexeme in lexemes:
        if isinstance(lexeme, str) and result and isinstance(result[-1], str):
            result[-1] += lexeme
        else:
            result.append(lexeme)
    return result


def ids_of(segments: list[tuple[str, bool]]) -> list[int]:
    return [token for text, markup in segments for token in TOKENIZER.encode(text, allow_special=markup)]


@pytest.mark.parametrize("name", TEXTS)
def test_markers_are_those_of_the_ids(name: str) -> None:
    """Also where another lexer goes on after some marker."""
    ids = ids_of(TEXTS[name])
    draw, marked = random.Random(name), (([text], TextLexer().feed(text))[markup] for text, markup in TEXTS[name])
    expected = joined([lexeme for lexemes in marked for lexeme in lexemes])
    markers = sum(isinstance(lexeme, Marker) for lexeme in expected)
    for number in range(300):
        lexer = AlignedLexer(IDS, TOKENIZER.decode)
        found: list[Lexeme] = []
        stop = number % (markers + 2)  # of 0 and markers + 1 none is the last of the first lexer
        for text, group in tokens_and_text(ids, draw):
            lexer.feed(text, group)
            for lexeme in lexer.lexemes():
                found.append(lexeme)
                if isinstance(lexeme, Marker) and sum(isinstance(each, Marker) for each in found) == stop:
                    rest, lexer = lexer.rest(), AlignedLexer(IDS, TOKENIZER.decode)
                    lexer.feed(*rest)
                    found += lexer.lexemes()
                    break
        assert joined([*found, *lexer.flush()]) == expected


def test_text_that_ends_before_its_tokens() -> None:
    """A stop string takes the rest of the text away, not the ids."""
    ids = ids_of([("Answer STOP", False), (SECTION_BEGIN, True)])
    lexer = AlignedLexer(IDS, TOKENIZER.decode)
    lexer.feed("Answer ", ids)
    assert [*lexer.lexemes(), *lexer.flush()] == ["Answer "]
