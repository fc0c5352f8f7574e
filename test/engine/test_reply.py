"""Replies: stop strings as str.find sees them, whatever the tokens, and messages as the whole text parses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kimi_k2.engine.reply import Reply
from kimi_k2.tokenization.deltas import AssistantMessage, collect
from kimi_k2.tokenization.message import parse_message
from kimi_k2.tokenization.tokenizer import KimiTokenizer

TOOLS = [{"type": "function", "function": {"name": "get"}}]
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
    '{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|>'
)


@pytest.fixture(scope="module")
def tokenizer(checkpoints: dict[str, Path]) -> KimiTokenizer:
    return KimiTokenizer.from_pretrained(checkpoints["k2.5"])


def run(reply: Reply, tokens: list[int]) -> AssistantMessage:
    """What the deltas add up to."""
    deltas = [delta for token in tokens for delta in reply.feed(token)] + reply.finish()
    assert reply.finish_reason is not None
    return collect(deltas, reply.finish_reason)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet="ab é\n", max_size=30),
    stop=st.lists(st.text(alphabet="ab é\n", min_size=1, max_size=4), max_size=3),
    least=st.just(0) | st.integers(0, 8),
)
@example(text="a é", stop=["é"], least=3)
def test_stop_strings_cut_where_the_first_of_them_begins(
    tokenizer: KimiTokenizer, text: str, stop: list[str], least: int
) -> None:
    """One that is whole within min_tokens ends nothing; by vLLM's rule it may begin there."""
    tokens = tokenizer.encode(text)
    # The bytes of a character that is not whole are held back, so it may begin a stop string.
    early, expected = len(tokenizer.decode(tokens[:least]).rstrip("\ufffd")), text
    for count in range(least + 1, len(tokens) + 1):
        so_far = tokenizer.decode(tokens[:count])
        found = [at for string in stop if (at := so_far.find(string, max(0, early - len(string) + 1))) >= 0]
        if found:
            expected = text[: min(found)]
            break
    reply = Reply(tokenizer, {0}, stop=stop, parse=False, min_tokens=least)
    shown = run(reply, tokens)
    assert (shown.content, reply.text) == (expected, expected)
    assert reply.finish_reason == ("length" if expected == text else "stop")


@pytest.mark.parametrize("stop", [[], ["<|tool_call_end|>."], ["no", "surely", "<|tool_calls_section_begin|><|too_"]])
def test_markers_spelled_in_ordinary_tokens_are_text(tokenizer: KimiTokenizer, stop: list[str]) -> None:
    """Also where what may begin a stop string is held back, and its text comes after its tokens."""
    quoted = f"write {CALL} and </think>"
    tokens = tokenizer.encode("<think>Bern.</think>", allow_special=True) + tokenizer.encode(quoted)
    shown = run(Reply(tokenizer, {0}, tools=TOOLS, stop=stop), tokens + tokenizer.encode(CALL, allow_special=True))
    assert (shown.reasoning_content, shown.content) == ("Bern.", quoted)
    assert [(call.name, call.arguments) for call in shown.tool_calls] == [("get", '{"city": "Bern"}')]


@pytest.mark.parametrize("prefilled", [False, True])
def test_deltas_add_up_to_the_parsed_message(tokenizer: KimiTokenizer, prefilled: bool) -> None:
    text = ("" if prefilled else "<think>") + "Bern, surely.</think>I look.\n" + CALL
    end = tokenizer.special_tokens["<|im_end|>"]
    reply = Reply(tokenizer, {end}, prefilled=prefilled, tools=TOOLS)
    shown = run(reply, [*tokenizer.encode(text, allow_special=True), end, 1, 2, 3])
    assert reply.text == text
    assert reply.finish_reason == "tool_calls"
    assert (shown.reasoning_content, shown.content.strip()) == ("Bern, surely.", "I look.")
    assert reply.message == shown == parse_message(text, prefilled=prefilled)
    (call,) = shown.tool_calls
    assert (call.name, call.arguments) == ("get", '{"city": "Bern"}')
