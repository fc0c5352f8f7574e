"""Tool-call and reasoning parsers: whole, cut at every character, character by character, and malformed."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import as_tuples, call, check_cuts, section, streamed, without_markers

from kimi_k2.tokenization.deltas import (
    AssistantMessage,
    Content,
    Delta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from kimi_k2.tokenization.message import MessageStream, parse_message
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

LONG = json.dumps({"text": "x" * 9000, "nested": {"q": '<"\\n'}})
F = ("functions.f:0", "f", '{"a": 1}')
G = ("functions.g:1", "g", "{}")
CALL_G = call("functions.g:1", "{}")

# text, content, [(id, name, arguments)]
GOOD: dict[str, tuple[str, str, list[tuple[str, str, str]]]] = {
    "empty": ("", "", []),
    "name with a colon": (section(call("functions.ns:f:3")), "", [("functions.ns:f:3", "ns:f", '{"a": 1}')]),
    "name called functions": (
        section(call("functions.functions.x:0")), "", [("functions.functions.x:0", "functions.x", '{"a": 1}')]),
    "white space between": (
        SECTION_BEGIN + "\n " + call(" functions.f:0 ") + "\n" + call("functions.g:1", "") + "\n" + SECTION_END,
        "", [F, ("functions.g:1", "g", "")]),
    "arguments that are no JSON": (section(call(arguments='{"a": ')), "", [("functions.f:0", "f", '{"a": ')]),
    "section not closed": (SECTION_BEGIN + call(), "", [F]),
    "singular section": (f"<|tool_call_section_begin|>{call()}<|tool_call_section_end|>", "", [F]),
    "white space after the id's colon": (
        section(call("functions.f: 0")), "", [("functions.f: 0", "f", '{"a": 1}')]),
    "sanitised id": (section(call("functions_read_file_3")), "", [("functions_read_file_3", "read_file", '{"a": 1}')]),
    "markers in arguments that cannot end them": (
        section(call(arguments=f"{THINK}{ARGUMENT_BEGIN}{THINK_END}")), "",
        [("functions.f:0", "f", f"{THINK}{ARGUMENT_BEGIN}{THINK_END}")]),
}  # fmt: skip

# A call cut off, or ended by another marker, is kept: text, content, calls, whether the last is complete.
HEAD = SECTION_BEGIN + CALL_BEGIN + "functions.f:0" + ARGUMENT_BEGIN
CUT: dict[str, tuple[str, str, list[tuple[str, str, str]]]] = {
    "arguments cut": (HEAD + '{"a": 1', "", [("functions.f:0", "f", '{"a": 1')]),
    "arguments cut in a marker": (HEAD + "{}<|tool_call_e", "", [("functions.f:0", "f", "{}<|tool_call_e")]),
    "no arguments yet": (HEAD, "", [("functions.f:0", "f", "")]),
    "cut call after a good one": (
        SECTION_BEGIN + call() + CALL_BEGIN + "functions.g:1" + ARGUMENT_BEGIN + '{"b', "",
        [F, ("functions.g:1", "g", '{"b')]),
    "call not closed before the section's end": (HEAD + "{}" + SECTION_END, "", [("functions.f:0", "f", "{}")]),
    "section within arguments": (HEAD + SECTION_BEGIN + SECTION_END, "", [("functions.f:0", "f", "")]),
}  # fmt: skip

# Nothing here tells a function: all comes back as content, without the markers.
MALFORMED = {
    "section with text": section("hello"),
    "section begun and cut": "x" + SECTION_BEGIN,
    "no id": section(call("")),
    "id without index": section(call("functions.f")),
    "id with a space": section(call("functions.f g:0")),
    "id with a word for an index": section(call("functions.f:x")),
    "id with an index of other digits": section(call("functions.f:\u0663")),
    "prefix alone": section(call("functions.:0")),
    "index alone": section(call(":0")),
    "foreign id without tools": section(call("call_6b0e7c24")),
    "header cut": SECTION_BEGIN + CALL_BEGIN + "functions.f",
    "two headers": section(CALL_BEGIN + "functions.f:0" + CALL_BEGIN + "functions.f:0"),
    "section within a section": SECTION_BEGIN + SECTION_BEGIN + SECTION_END,
    "markers in an unknown call's arguments": section(call("what?", f"{THINK}{{{ARGUMENT_BEGIN}}}")),
}


@pytest.mark.parametrize("name", GOOD)
def test_whole(name: str) -> None:
    text, content, calls = GOOD[name]
    message = parse_message(text)
    assert (message.content, as_tuples(message)) == (content, calls)
    assert all(tool_call.complete for tool_call in message.tool_calls)


@pytest.mark.parametrize("name", CUT)
def test_a_call_that_is_cut_off_is_kept(name: str) -> None:
    text, content, calls = CUT[name]
    message = parse_message(text)
    assert (message.content, as_tuples(message)) == (content, calls)
    assert [tool_call.complete for tool_call in message.tool_calls] == [True] * (len(calls) - 1) + [False]
    assert message.tool_calls[-1].problem() == "the call was cut off before its end"


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_comes_back_as_content_without_markers(name: str) -> None:
    assert parse_message(MALFORMED[name], reason="stop") == AssistantMessage(content=without_markers(MALFORMED[name]))


def test_white_space_alone_in_a_section_is_no_content() -> None:
    assert parse_message(SECTION_BEGIN + "  \n") == AssistantMessage()
    assert parse_message(SECTION_BEGIN + "  \nx ").content == "  \nx "


def test_bad_call_beside_a_good_one() -> None:
    message = parse_message(section(call("what?"), CALL_G))
    assert (message.content, as_tuples(message)) == ('what?{"a": 1}', [G])


ALL = {**{name: text for name, (text, _, _) in {**GOOD, **CUT}.items()}, **MALFORMED}


@pytest.mark.parametrize("name", ALL)
def test_cut_at_every_character(name: str) -> None:
    text = ALL[name]
    whole = parse_message(text)
    step = max(1, len(text) // 400)  # the 9000-character case at 400 places
    for place in range(0, len(text) + 1, step):
        assert streamed([text[:place], text[place:]])[0] == whole, place
    assert streamed(list(text))[0] == whole
    check_cuts(text, 20)


def test_arguments_stream_as_they_come() -> None:
    parser = MessageStream()
    assert parser.feed(SECTION_BEGIN + CALL_BEGIN + "functions.f:0") == []
    assert parser.feed(ARGUMENT_BEGIN + '{"a"') == [
        ToolCallStart(0, "functions.f:0", "f"),
        ToolCallArguments(0, '{"a"'),
    ]
    assert parser.feed(": 1}<|tool_") == [ToolCallArguments(0, ": 1}")]
    assert parser.feed("call_end|>") == [ToolCallEnd(0)]
    assert parser.finish() == []


def test_content_streams_as_it_comes() -> None:
    parser = MessageStream()
    assert parser.feed("a <") == [Content("a ")]
    assert parser.feed("b") == [Content("<b")]
    assert parser.feed(SECTION_BEGIN + " \n") == []
    assert parser.feed("noise") == [Content(" \nnoise")]
    assert parser.feed("more") == [Content("more")]
    assert parser.feed(CALL_BEGIN + "what?" + ARGUMENT_BEGIN + "{") == [Content("what?{")]
    assert parser.feed("}") == [Content("}")]


def test_a_cut_call_ends_at_the_end() -> None:
    parser = MessageStream()
    deltas: list[Delta] = parser.feed(HEAD + "{") + parser.finish()
    assert deltas[-1] == ToolCallEnd(0, complete=False)
    assert collect(deltas) == AssistantMessage(tool_calls=[ToolCall("functions.f:0", "f", "{", False)])


@pytest.mark.parametrize(("arguments", "problem"), [
    ('{"a": 1}', None), ("", "no JSON: "), ('{"a": ', "no JSON: "), ("[1]", "no JSON object but list"),
    ('{"a": "{"b": 1}"}', "no JSON: "), ('"{}"', "no JSON object but str"),  # vllm#41739: clients had no sign of it
    ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
])  # fmt: skip
def test_problems_of_arguments_are_told(arguments: str, problem: str | None) -> None:
    found = parse_message(section(call(arguments=arguments))).tool_calls[0].problem()
    assert found is None if problem is None else problem in str(found)


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
    (f"{THINK}why{CALL_BEGIN}rest", False, "why", f"{CALL_BEGIN}rest", True),
    # malformed: tags out of place are dropped, the text stays
    (f"answer{THINK_END}more", False, "", "answermore", True),
    (f"answer{THINK}late{THINK_END}", False, "", "answerlate", True),
    (f"{THINK_END}x", False, "", "x", True),
    (f"{THINK}a{THINK}b{THINK_END}c{THINK_END}d", False, "ab", "cd", True),
    (f"{THINK}a{SECTION_END}{CALL_END}b", False, "ab", "", False),
    ("<thin", False, "", "<thin", True),
    ("  <thin", True, "  <thin", "", False),
    # in arguments they are text
    (call(arguments=THINK) + THINK_END, False, "", call(arguments=THINK), True),
]


@pytest.mark.parametrize(("text", "prefilled", "reasoning", "content", "closed"), REASONING)
def test_reasoning_whole_and_cut_everywhere(
    text: str, prefilled: bool, reasoning: str, content: str, closed: bool
) -> None:
    expected = ReasonedText(reasoning, content, closed)
    assert parse_reasoning(text, prefilled=prefilled) == expected
    for pieces in [[text[:place], text[place:]] for place in range(len(text) + 1)] + [list(text)]:
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
def test_reasoning_loses_nothing(pieces: list[str], prefilled: bool, place: int) -> None:
    text = "".join(pieces)
    out = parse_reasoning(text, prefilled=prefilled)
    tagless = re.sub(f"{THINK}|{THINK_END}", "", text)
    assert (out.reasoning + out.content).split() == tagless.split()
    stream = ReasoningStream(prefilled=prefilled)
    parts = [stream.feed(text[:place]), stream.feed(text[place:]), stream.flush()]
    assert "".join(p.reasoning for p in parts) == out.reasoning
    assert "".join(p.content for p in parts) == out.content


@pytest.mark.parametrize("prefilled", [True, False])
def test_reasoning_that_the_prompt_opened_is_open_before_anything_came(prefilled: bool) -> None:
    assert ReasoningStream(prefilled=prefilled).feed("").closed is not prefilled


NESTED = [
    "<|tool_call_" + CALL_END + "begin|>",
    "a<|tool_call_" + "<|tool_calls_sec" + CALL_END + "tion_end|>" + "begin|>b",
    "<|tool_call_begin|" + section(call()) + ">x",
    "<|tool_" + THINK_END + "call_end|>" + "<|tool_call_be" + CALL_END,
]


@pytest.mark.parametrize("text", NESTED)
def test_markers_put_together_around_others_do_not_reach_content(text: str) -> None:
    whole = parse_message(text)
    assert without_markers(whole.content) == whole.content
    for size in (1, 2, 7):
        assert streamed([text[i : i + size] for i in range(0, len(text), size)])[0] == whole
    assert whole.content == {0: "", 1: "ab", 2: "x", 3: "<|tool_call_be"}[NESTED.index(text)]


def test_deeply_nested_markers_take_linear_time() -> None:
    depth = 20_000
    text = "<|tool_call_" * depth + CALL_END + "begin|>" * depth
    assert parse_message(text).content == ""
