"""Tool-call and reasoning parsers: whole, cut at every character, character by character, and malformed."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k2.tokenization.reasoning import ReasonedText, ReasoningStream, parse_reasoning
from kimi_k2.tokenization.special_tokens import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
)
from kimi_k2.tokenization.tool_calls import (
    Event,
    ParsedMessage,
    ToolCall,
    ToolCallAbandoned,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolCallStream,
    collect,
    parse_tool_calls,
)


def call(name: str = "functions.f:0", arguments: str = '{"a": 1}') -> str:
    return f"{CALL_BEGIN}{name}{ARGUMENT_BEGIN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return SECTION_BEGIN + "".join(calls) + SECTION_END


LONG = json.dumps({"text": "x" * 9000, "nested": {"q": '<"\\n'}})

# text, content, [(id, name, arguments)]
GOOD = {
    "plain": ("Just text.", "Just text.", []),
    "empty": ("", "", []),
    "one call": (section(call()), "", [("functions.f:0", "f", '{"a": 1}')]),
    "two calls": (
        "Let me look. " + section(call(), call("functions.g:1", "{}")),
        "Let me look. ",
        [("functions.f:0", "f", '{"a": 1}'), ("functions.g:1", "g", "{}")],
    ),
    "content after the section": (f"a{section(call())}b", "ab", [("functions.f:0", "f", '{"a": 1}')]),
    "two sections": (
        f"a{section(call())}b{section(call('functions.f:1'))}c",
        "abc",
        [("functions.f:0", "f", '{"a": 1}'), ("functions.f:1", "f", '{"a": 1}')],
    ),
    "dotted name": (section(call("functions.a.b.c:12")), "", [("functions.a.b.c:12", "a.b.c", '{"a": 1}')]),
    "name with a colon": (section(call("functions.ns:f:3")), "", [("functions.ns:f:3", "ns:f", '{"a": 1}')]),
    "name called functions": (
        section(call("functions.functions.x:0")),
        "",
        [("functions.functions.x:0", "functions.x", '{"a": 1}')],
    ),
    "no prefix": (section(call("search:0")), "", [("search:0", "search", '{"a": 1}')]),
    "arguments over 8192 characters": (section(call(arguments=LONG)), "", [("functions.f:0", "f", LONG)]),
    "white space between": (
        SECTION_BEGIN + "\n " + call(" functions.f:0 ") + "\n" + call("functions.g:1", "") + "\n" + SECTION_END,
        "",
        [("functions.f:0", "f", '{"a": 1}'), ("functions.g:1", "g", "")],
    ),
    "arguments that are no JSON": (section(call(arguments='{"a": ')), "", [("functions.f:0", "f", '{"a": ')]),
    "section not closed": (SECTION_BEGIN + call(), "", [("functions.f:0", "f", '{"a": 1}')]),
    "angle brackets in text": ("if a <| b and c |> d <|tool", "if a <| b and c |> d <|tool", []),
    "stray text between calls": (
        SECTION_BEGIN + call() + "and" + call("functions.g:1", "{}") + SECTION_END,
        "and",
        [("functions.f:0", "f", '{"a": 1}'), ("functions.g:1", "g", "{}")],
    ),
    "bad call beside a good one": (
        section(call("what?"), call("functions.g:1", "{}")),
        call("what?"),
        [("functions.g:1", "g", "{}")],
    ),
    "cut call after a good one": (
        SECTION_BEGIN + call() + CALL_BEGIN + "functions.g:1" + ARGUMENT_BEGIN + '{"b',
        CALL_BEGIN + "functions.g:1" + ARGUMENT_BEGIN + '{"b',
        [("functions.f:0", "f", '{"a": 1}')],
    ),
}

# Nothing here is a complete call, so all of it must come back as content, to the letter.
MALFORMED = {
    "empty section": section(),
    "section with text": section("hello"),
    "section begun and cut": "x" + SECTION_BEGIN,
    "section begun, white space": SECTION_BEGIN + "  \n",
    "call outside a section": call(),
    "stray end": f"a{SECTION_END}b{CALL_END}c{ARGUMENT_BEGIN}",
    "no id": section(call("")),
    "id without index": section(call("functions.f")),
    "id with a space": section(call("functions.f g:0")),
    "id with a word for an index": section(call("functions.f:x")),
    "prefix alone": section(call("functions.:0")),
    "index alone": section(call(":0")),
    "header without arguments": SECTION_BEGIN + CALL_BEGIN + "functions.f:0" + CALL_END + SECTION_END,
    "header cut": SECTION_BEGIN + CALL_BEGIN + "functions.f",
    "arguments cut": SECTION_BEGIN + CALL_BEGIN + "functions.f:0" + ARGUMENT_BEGIN + '{"a": 1',
    "arguments cut in a marker": SECTION_BEGIN + CALL_BEGIN + "functions.f:0" + ARGUMENT_BEGIN + '{}<|tool_call_e',
    "call not closed before the section's end":
        SECTION_BEGIN + CALL_BEGIN + "functions.f:0" + ARGUMENT_BEGIN + "{}" + SECTION_END,
    "section within a section": SECTION_BEGIN + SECTION_BEGIN + SECTION_END,
    "section within arguments":
        SECTION_BEGIN + CALL_BEGIN + "functions.f:0" + ARGUMENT_BEGIN + SECTION_BEGIN + SECTION_END,
}  # fmt: skip


def run(pieces: list[str], *, stream_arguments: bool = True) -> tuple[ParsedMessage, list[Event]]:
    parser = ToolCallStream(stream_arguments=stream_arguments)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
    return collect(events), events


def as_tuples(message: ParsedMessage) -> list[tuple[str, str, str]]:
    return [(c.id, c.name, c.arguments) for c in message.tool_calls]


@pytest.mark.parametrize("name", GOOD)
def test_whole(name: str) -> None:
    text, content, calls = GOOD[name]
    message = parse_tool_calls(text)
    assert (message.content, as_tuples(message)) == (content, calls)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_comes_back_as_content_to_the_letter(name: str) -> None:
    assert parse_tool_calls(MALFORMED[name]) == ParsedMessage(MALFORMED[name], [])


ALL = {**{name: text for name, (text, _, _) in GOOD.items()}, **MALFORMED}


@pytest.mark.parametrize("stream_arguments", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_cut_at_every_character(name: str, stream_arguments: bool) -> None:
    text = ALL[name]
    whole = parse_tool_calls(text)
    step = max(1, len(text) // 400)  # the 9000-character case at 400 places
    for cut in range(0, len(text) + 1, step):
        assert run([text[:cut], text[cut:]], stream_arguments=stream_arguments)[0] == whole, cut
    assert run(list(text), stream_arguments=stream_arguments)[0] == whole


def test_long_texts_with_a_section_at_every_place() -> None:
    text = section(call(), call("bad"), call("functions.g:1", "{}"))
    short = parse_tool_calls(text)
    for before in range(4096 - len(text) - 1, 4097):
        message = parse_tool_calls("x" * before + text + "y" * 5000)
        assert message.content == "x" * before + short.content + "y" * 5000
        assert message.tool_calls == short.tool_calls


PIECES = st.lists(
    st.sampled_from(
        [SECTION_BEGIN, SECTION_END, CALL_BEGIN, CALL_END, ARGUMENT_BEGIN, "functions.f:0", "functions.a.b:7", "{}",
         '{"x": 1}',
         " ", "\n", "text", "<|", "<|tool_call", "functions.", ":", call(), section(call())]
    ),
    max_size=12,
)  # fmt: skip


@given(PIECES, st.lists(st.integers(0, 400), max_size=6), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_mixture_any_cuts(pieces: list[str], cuts: list[int], stream_arguments: bool) -> None:
    text = "".join(pieces)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [text[a:b] for a, b in pairwise(places)] or [text]
    message, events = run(parts, stream_arguments=stream_arguments)
    assert message == parse_tool_calls(text)
    # Nothing lost: every character is content, part of a complete call, white space or a marker of a valid section.
    rest = text
    for tool_call in message.tool_calls:
        for part in (tool_call.id, tool_call.arguments):
            assert part in rest
            rest = rest.replace(part, "", 1)
    for marker in (SECTION_BEGIN, SECTION_END, CALL_BEGIN, CALL_END, ARGUMENT_BEGIN, " ", "\n"):
        rest = rest.replace(marker, "")
    content = message.content
    for marker in (SECTION_BEGIN, SECTION_END, CALL_BEGIN, CALL_END, ARGUMENT_BEGIN, " ", "\n"):
        content = content.replace(marker, "")
    assert sorted(content) == sorted(rest)
    if not message.tool_calls:
        assert message.content == text
    if not stream_arguments:
        assert not any(isinstance(event, ToolCallAbandoned) for event in events)


def test_arguments_stream_as_they_come() -> None:
    parser = ToolCallStream()
    assert parser.feed(SECTION_BEGIN + CALL_BEGIN + "functions.f:0") == []
    assert parser.feed(ARGUMENT_BEGIN + '{"a"') == [
        ToolCallStart(0, "functions.f:0", "f"),
        ToolCallArguments(0, '{"a"'),
    ]
    assert parser.feed(": 1}<|tool_") == [ToolCallArguments(0, ": 1}")]
    assert parser.feed("call_end|>") == [ToolCallEnd(0)]
    assert parser.flush() == []


def test_an_abandoned_call_is_taken_back() -> None:
    parser = ToolCallStream()
    text = SECTION_BEGIN + CALL_BEGIN + "functions.f:0" + ARGUMENT_BEGIN + "{"
    events = parser.feed(text) + parser.flush()
    assert ToolCallAbandoned(0) in events
    assert collect(events) == ParsedMessage(text, [])
    assert parse_tool_calls(section(call())).tool_calls == [ToolCall("functions.f:0", "f", '{"a": 1}')]


# text, prefilled -> reasoning, content, closed
REASONING = [
    (f"{THINK}why{THINK_END}answer", False, "why", "answer", True),
    (f"why{THINK_END}answer", True, "why", "answer", True),
    (f"{THINK}why{THINK_END}answer", True, "why", "answer", True),
    (f"\n {THINK}why{THINK_END}\nanswer", False, "why", "\nanswer", True),
    ("answer", False, "", "answer", True),
    ("", False, "", "", True),
    ("", True, "", "", False),
    (f"{THINK}{THINK_END}answer", False, "", "answer", True),
    (f"{THINK}never ends", False, "never ends", "", False),
    ("never ends", True, "never ends", "", False),
    (f"{THINK}cut </thi", False, "cut </thi", "", False),
    (f"{THINK}why{SECTION_BEGIN}rest", False, "why", f"{SECTION_BEGIN}rest", True),
    # malformed: tags out of place are content, to the letter
    (f"answer{THINK_END}more", False, "", f"answer{THINK_END}more", True),
    (f"answer{THINK}late{THINK_END}", False, "", f"answer{THINK}late{THINK_END}", True),
    (f"{THINK_END}x", False, "", f"{THINK_END}x", True),
    (f"{THINK}a{THINK}b{THINK_END}c{THINK_END}d", False, f"a{THINK}b", f"c{THINK_END}d", True),
    ("<thin", False, "", "<thin", True),
    ("  <thin", True, "  <thin", "", False),
]


@pytest.mark.parametrize(("text", "prefilled", "reasoning", "content", "closed"), REASONING)
def test_reasoning_whole_and_cut_everywhere(
    text: str, prefilled: bool, reasoning: str, content: str, closed: bool
) -> None:
    expected = ReasonedText(reasoning, content, closed)
    assert parse_reasoning(text, prefilled=prefilled) == expected
    for pieces in [[text[:cut], text[cut:]] for cut in range(len(text) + 1)] + [list(text)]:
        stream = ReasoningStream(prefilled=prefilled)
        parts = [stream.feed(piece) for piece in pieces] + [stream.flush()]
        joined = ReasonedText("".join(p.reasoning for p in parts), "".join(p.content for p in parts), parts[-1].closed)
        assert joined == expected


@given(
    st.lists(st.sampled_from([THINK, THINK_END, SECTION_BEGIN, "a", " ", "<", "</think", "think>"]), max_size=10),
    st.booleans(),
    st.integers(0, 80),
)
@settings(max_examples=300, deadline=None)
def test_reasoning_loses_nothing(pieces: list[str], prefilled: bool, cut: int) -> None:
    text = "".join(pieces)
    out = parse_reasoning(text, prefilled=prefilled)
    candidates = {out.reasoning + middle + out.content for middle in ("", THINK_END)}
    opened = {
        c for candidate in candidates for c in (candidate, text[: len(text) - len(text.lstrip())] + THINK + candidate)
    }
    assert text in opened
    stream = ReasoningStream(prefilled=prefilled)
    parts = [stream.feed(text[:cut]), stream.feed(text[cut:]), stream.flush()]
    assert "".join(p.reasoning for p in parts) == out.reasoning
    assert "".join(p.content for p in parts) == out.content
