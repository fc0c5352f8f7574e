"""Messages' parsers: vLLM's and SGLang's own cases, reports, ours and drawn ones; whole, in pieces, in tokens, in two.

KIMI_K2_DRAWS sets the number of ways to cut each case; 1000 for the full check.
"""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import (
    apply_chat_template,
    as_tuples,
    call,
    check_cuts,
    check_nothing_is_lost,
    cut,
    in_two,
    render_segments,
    section,
    streamed,
    tool,
)
from peer_cases import HEAD, OWN, REPORTED, SGLANG, VLLM, Case

from kimi_k2.errors import TokenizerError
from kimi_k2.synthetic.checkpoint import synthetic_ranks
from kimi_k2.tokenization.deltas import (
    AssistantMessage,
    Content,
    Delta,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from kimi_k2.tokenization.lexer import Marker
from kimi_k2.tokenization.message import MessageStream, opens_reasoning, parse_message
from kimi_k2.tokenization.reasoning import ReasoningStream
from kimi_k2.tokenization.special_tokens import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
    special_tokens,
)
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.tokenizer import KimiTokenizer

CUTS = int(os.environ.get("KIMI_K2_DRAWS", "100"))
DOCUMENT = Path(__file__).parents[2] / "docs" / "parsers.md"
TOKENIZER = KimiTokenizer(synthetic_ranks(512), special_tokens(512))
CASES = {
    f"{source} {case.name}": case
    for source, cases in (("vllm", VLLM), ("sglang", SGLANG), ("reported", REPORTED), ("own", OWN))
    for case in cases
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_case(case: Case) -> None:
    message = check_cuts(case.text, CUTS, tools=case.tools, prefilled=case.prefilled)
    assert (message.reasoning_content, message.content, as_tuples(message)) == (
        case.reasoning,
        case.content,
        case.calls,
    )
    assert message.finish_reason == (case.finish_reason or ("tool_calls" if case.calls else "stop"))
    complete = [each.complete for each in message.tool_calls]
    assert complete == ([True] * len(case.calls))[:-1] + [not case.cut][: len(case.calls)]


def test_each_difference_is_documented() -> None:
    rows = set(re.findall(r"^\| ([^|]+?) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    differences = {case.difference for case in CASES.values() if case.difference}
    assert differences <= rows
    listed = DOCUMENT.read_text(encoding="utf-8").split("## Differences")[1]
    assert {row for row in rows if f"| {row} |" in listed} - {"what", "---"} == differences


CALL = call("functions.a.b:0", '{"q": "<x>"}')
FULL = f"{THINK}why{THINK_END}I will. {section(CALL)}"
MIXTURE = [THINK, THINK_END, SECTION_BEGIN, SECTION_END, CALL, CALL_BEGIN, CALL_END, ARGUMENT_BEGIN, "functions.f:1",
           "functions.:0", "functions.a.b:7", "functions.", ":", "3", "call_12", "{}", '{"x": 1}', " ", "\n", "text",
           "<|", "<|tool_call", "</th", section(CALL), "é汉", "\U0001f600"]  # fmt: skip
TOOLS = [None, [], [tool("f")], [tool("f", "x"), tool("g", "y")]]


@given(
    st.lists(st.sampled_from(MIXTURE), max_size=12), st.booleans(), st.booleans(), st.sampled_from(TOOLS),
    st.lists(st.integers(0, 400), max_size=6),
)  # fmt: skip
@settings(max_examples=500, deadline=None)
def test_any_mixture_any_cuts(pieces: list[str], prefilled: bool, after: bool, tools: Any, cuts: list[int]) -> None:
    text = "".join(pieces)
    options: dict[str, Any] = {"prefilled": prefilled, "after_reasoning": after, "tools": tools}
    whole, _ = streamed([text], **options)
    found, deltas = streamed(cut(text, cuts), **options)
    assert found == whole
    assert from_tokens(TOKENIZER.encode(text, allow_special=True), **options) == whole
    if not after:
        assert in_two(cut(text, cuts), prefilled=prefilled, tools=tools) == whole
    assert not (after and whole.reasoning_content)
    arguments = "".join(each.arguments for each in whole.tool_calls)
    if not any(marker.value in arguments for marker in Marker):
        check_nothing_is_lost(text, whole)
    begun = [delta.index for delta in deltas if isinstance(delta, ToolCallStart)]
    assert begun == list(range(len(begun)))
    assert [delta.index for delta in deltas if isinstance(delta, ToolCallEnd)] == begun


@pytest.mark.parametrize(("text", "content"), [
    ("<|tool_call_" + CALL_END + "begin|>", ""), ("<|tool_call_begin|" + section(call()) + ">x", "x"),
    ("a<|tool_call_" + "<|tool_calls_sec" + CALL_END + "tion_end|>" + "begin|>b", "ab"),
    ("<|tool_" + THINK_END + "call_end|>" + "<|tool_call_be" + CALL_END, "<|tool_call_be"),
    ("<" * 600, "<" * 600),
])  # fmt: skip
def test_markers_put_together_around_others_do_not_reach_content(text: str, content: str) -> None:
    for pieces in ([text], list(text), cut(text, range(0, len(text), 7))):
        assert streamed(pieces)[0].content == content


IN_CALL = HEAD + "{"


@pytest.mark.parametrize(("text", "reason", "expected"), [
    ("done", "stop", "stop"), ("cut", "length", "length"), (FULL, "length", "length"), (IN_CALL, "length", "length"),
    (IN_CALL, "stop", "tool_calls"), (f"{THINK}odd", "stop", "stop"),
])  # fmt: skip
def test_finish_reasons(text: str, reason: Any, expected: str) -> None:
    assert parse_message(text, reason=reason).finish_reason == expected


STARTED = ToolCallStart(0, "functions.f:0", "f")


@pytest.mark.parametrize("steps", [
    [(SECTION_BEGIN + CALL_BEGIN + "functions.f:0", []),
     (ARGUMENT_BEGIN + '{"a"', [STARTED, ToolCallArguments(0, '{"a"')]),
     (": 1}<|tool_", [ToolCallArguments(0, ": 1}")]), ("call_end|>", [ToolCallEnd(0)]), (None, [])],
    [("a <", [Content("a ")]), ("b", [Content("<b")]), (SECTION_BEGIN + " \n", []), ("noise", [Content(" \nnoise")]),
     ("more", [Content("more")]), (CALL_BEGIN + "what?" + ARGUMENT_BEGIN + "{", [Content("what?{")]),
     ("}", [Content("}")])],
    [(f"{THINK}why{THINK_END}ok{HEAD}{{",
      [Reasoning("why"), Content("ok"), STARTED, ToolCallArguments(0, "{")]), (None, [ToolCallEnd(0, complete=False)])],
])  # fmt: skip
def test_deltas_come_as_soon_as_they_are_known(steps: list[tuple[str | None, list[Delta]]]) -> None:
    stream = MessageStream()
    for text, deltas in steps:
        assert (stream.finish() if text is None else stream.feed(text)) == deltas
        assert (stream.finish_reason is None) is (text is not None)


@pytest.mark.parametrize(("arguments", "problem"), [
    ('{"a": 1}', None), ("", "no JSON: "), ('{"a": ', "no JSON: "), ("[1]", "no JSON object but list"),
    ('{"a": "{"b": 1}"}', "no JSON: "), ('"{}"', "no JSON object but str"),  # vllm#41739: clients had no sign of it
    ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"), (None, "the call was cut off before its end"),
])  # fmt: skip
def test_problems_of_arguments_are_told(arguments: str | None, problem: str | None) -> None:
    text = HEAD if arguments is None else section(call(arguments=arguments))
    found = parse_message(text).tool_calls[0].problem()
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(("text", "prefilled", "closed"), [
    ("", True, False), ("", False, True), (THINK, False, False), (f"a{THINK_END}", True, True), (THINK, True, False),
    (THINK + SECTION_BEGIN, False, True), ("a", False, True), ("  ", True, False),
])  # fmt: skip
def test_reasoning_is_open_or_closed(text: str, prefilled: bool, closed: bool) -> None:
    assert ReasoningStream(prefilled=prefilled).feed(text).closed is closed


@pytest.mark.parametrize("style", [ChatStyle.THINKING, ChatStyle.K25])
def test_a_parsed_message_renders_to_the_same_text(style: ChatStyle) -> None:
    prompt: list[Any] = [{"role": "user", "content": f"go {THINK}"}]
    opened = render_segments(prompt, style=style)
    assert opens_reasoning(opened) is style.is_k25
    generated = FULL.removeprefix(THINK) if opens_reasoning(opened) else FULL
    message = parse_message(generated, prefilled=opens_reasoning(opened)).to_openai()
    json.dumps(message)
    assert message["content"] == "I will. "
    assert parse_message(CALL).to_openai()["content"] is None  # as OpenAI's API has it
    again = apply_chat_template([*prompt, message], style=style, add_generation_prompt=False)
    assert again == "".join(segment.text for segment in opened) + generated + "<|im_end|>"
    assert not opens_reasoning([])


def test_nothing_follows_the_last() -> None:
    reasoning, message = ReasoningStream(), MessageStream()
    reasoning.feed("", last=True)
    message.finish()
    with pytest.raises(TokenizerError, match="the message is finished"):
        reasoning.feed("a")
    with pytest.raises(TokenizerError, match="the message is finished"):
        message.feed("a")


def from_tokens(tokens: list[int], **options: Any) -> AssistantMessage:
    stream = MessageStream(tokenizer=TOKENIZER, **options)
    decoder = TOKENIZER.incremental_decoder()
    deltas = [delta for token in tokens for delta in stream.feed(decoder.feed(token), [token])]
    deltas += stream.feed(decoder.flush()) + stream.finish()
    return collect(deltas, str(stream.finish_reason))


def test_markers_spelled_in_ordinary_tokens_are_text() -> None:
    quoted = f"write {CALL_END}{SECTION_END} and {THINK}"
    before = TOKENIZER.encode(f"{THINK}a{THINK_END}", allow_special=True)
    assert from_tokens(before + TOKENIZER.encode(quoted)).content == quoted
    tokens = TOKENIZER.encode(IN_CALL, allow_special=True) + TOKENIZER.encode(quoted + "}")
    tokens += TOKENIZER.encode(CALL_END + SECTION_END, allow_special=True)
    assert from_tokens(tokens).tool_calls == [ToolCall("functions.f:0", "f", "{" + quoted + "}")]
    half = TOKENIZER.encode("\U0001f600")[:-1]
    assert (
        from_tokens(half).content
        == from_tokens([*half, *TOKENIZER.encode(CALL, allow_special=True)]).content
        == "\ufffd"
    )


def test_ids_need_a_tokenizer() -> None:
    with pytest.raises(TokenizerError, match="made with a tokenizer"):
        MessageStream().feed("a", [1])


DEPTH = 20_000


@pytest.mark.parametrize(("before", "text", "size", "most"), [
    # Of a call with 200 kB of arguments nothing is kept that could be scanned again.
    (HEAD, json.dumps({"text": "<" * 1000 + "x" * 199_000}), 50, 50_000),
    # Held back a byte each, since another marker's end may make them one, then once in pieces and once as the answer.
    *(("", marker * 10_000, 1000, 3 * 10_000 * len(marker))
      for marker in (CALL_BEGIN, SECTION_BEGIN, THINK, "<")),
    ("", "<|tool_call_" * DEPTH + CALL_END + "begin|>" * DEPTH, 1000, 3 * 20 * DEPTH),
])  # fmt: skip
def test_work_and_memory_are_linear_in_the_stream(before: str, text: str, size: int, most: int) -> None:
    stream = MessageStream(tools=[tool("f")])
    stream.feed(before)
    pieces, emitted = cut(text, range(0, len(text), size)), 0
    tracemalloc.start()
    for piece in pieces:
        emitted += sum(len(delta.text) for delta in stream.feed(piece) if isinstance(delta, ToolCallArguments))
    stream.finish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert emitted == (len(text) if before else 0)
    assert peak < most
