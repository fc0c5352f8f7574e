"""Failures that users reported against other engines and the model's own repository, by the number of the thread."""

from __future__ import annotations

import json
from typing import Any

import pytest
from parser_cases import as_tuples, call, check_cuts, section, streamed, tool

from kimi_k2.tokenization.chat import ChatStyle, apply_chat_template, render_segments
from kimi_k2.tokenization.deltas import Content
from kimi_k2.tokenization.lexer import SPELLINGS
from kimi_k2.tokenization.message import opens_reasoning, parse_message
from kimi_k2.tokenization.special_tokens import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
)

READ = tool("read_file", "path")
RUN = tool("run", "command", "timeout")
LONG = json.dumps({"path": "a.py", "text": 'def f():\n    return "<|{}|>"\n' * 800})


def read(index: int, arguments: str = '{"path": "a.py"}') -> str:
    result: str = call(f"functions.read_file:{index}", arguments)
    return result


def reads(index: int, arguments: str = '{"path": "a.py"}') -> tuple[str, str, str]:
    return (f"functions.read_file:{index}", "read_file", arguments)


def test_vllm_24478_calls_without_space_between_them() -> None:
    """vllm#24478: a greedy pattern ran over a call's end into the next one: two calls came back as a garbled one."""
    message = check_cuts("Both: " + section(read(0), read(1, '{"path": "<b>"}'), read(2)), 50)
    assert as_tuples(message) == [reads(0), reads(1, '{"path": "<b>"}'), reads(2)]


def test_vllm_37184_large_arguments_and_leaked_markers() -> None:
    """vllm#37184: a section was given up after 8192 characters, and text before its first call leaked out with markers.

    Arguments were found by their characters in single deltas, which went wrong on nested JSON and cut tokens.
    """
    assert len(LONG) > 3 * 8192
    message = check_cuts("Write: " + section("\n", read(0, LONG), read(1)), 10)
    assert (message.content, as_tuples(message)) == ("Write: ", [reads(0, LONG), reads(1)])


def test_vllm_38579_deltas_with_several_markers() -> None:
    """vllm#38579: what its rewrite mended: arguments cut where one delta held a call's end and the next one's begin
    (speculative decoding), text before the section lost, an id after a line break dropped.
    """
    text = "Before." + SECTION_BEGIN + CALL_BEGIN + "\nfunctions.read_file:0" + ARGUMENT_BEGIN
    pieces = [text + '{"path": ', '"a.py"}' + CALL_END + CALL_BEGIN + "functions.read_file:1", ARGUMENT_BEGIN + "{}"]
    message, _ = streamed([*pieces, CALL_END + SECTION_END + "After."])
    assert (message.content, as_tuples(message)) == ("Before.After.", [reads(0), reads(1, "{}")])


@pytest.mark.parametrize("arguments", ['{"input": "{"key": "value"}"}', '{"input": "{\\"key\\": 1}"', '"{}"'])
def test_vllm_41739_malformed_arguments_are_told(arguments: str) -> None:
    """vllm#41739: K2.6 wrote arguments that are no JSON object, and clients got them without any sign of it."""
    found = check_cuts(section(read(0, arguments), read(1)), 20).tool_calls
    assert found[0].arguments == arguments
    assert "no JSON" in str(found[0].problem())
    assert found[1].problem() is None


@pytest.mark.parametrize("identifier", ["call_0b8c5b0f2b6f4c0e", "chatcmpl-tool-5f1e", "call-7", "fc_68"])
def test_vllm_50768_id_of_another_api(identifier: str) -> None:
    """vllm#50768: the history held ids of the Responses API, so the model wrote `call_...` instead of a function's
    name, and its whole call came back as text, markers included.
    """
    text = section(call(f" {identifier} ", '{"command": "ls"}'))
    message = check_cuts(text, 30, tools=[READ, RUN])
    assert as_tuples(message) == [(identifier, "run", '{"command": "ls"}')]
    assert check_cuts(text, 30).content.split() == [identifier, '{"command":', '"ls"}']


def test_vllm_50768_ids_in_the_prompt() -> None:
    """vllm#50768, its cause: the template shows an id as it is, and nothing else names the function."""
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [{"id": "call_0b8c", "function": {"name": "run", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_0b8c", "content": "ok"},
    ]
    for style in ChatStyle:
        text = apply_chat_template(history, style=style)
        assert "call_0b8c" not in text
        assert text.count("functions.run:0") == 2


def test_sglang_18086_call_inside_reasoning() -> None:
    """sglang#18086: K2.5 calls a tool without closing <think>; the call was taken for reasoning and never made."""
    for prefilled, opening in ((False, THINK), (True, "")):
        text = opening + "I need the file." + section(read(0)) + THINK_END
        message = check_cuts(text, 50, prefilled=prefilled)
        assert (message.reasoning_content, message.content) == ("I need the file.", "")
        assert as_tuples(message) == [reads(0)]
        assert message.finish_reason == "tool_calls"


def test_sglang_23341_a_stream_that_ends_early() -> None:
    """sglang#23341: at the token limit the answer came back empty with finish_reason stop."""
    for text, calls in (
        (f"{THINK}Long thoughts", []),
        (f"{THINK}a{THINK_END}The answer is", []),
        (SECTION_BEGIN + read(0)[: -len(CALL_END) - 3], [reads(0, '{"path": "a.p')]),
    ):
        message = parse_message(text, reason="length")
        assert message.reasoning_content or message.content or message.tool_calls
        assert as_tuples(message) == calls
        assert message.finish_reason == "length"
    assert parse_message(f"{THINK}a{THINK_END}The answer is").content == "The answer is"


def test_sglang_23363_long_arguments_late_in_a_conversation() -> None:
    """sglang#23363: from the second turn on, streams with long arguments lost calls or hung; parts of a cut end marker
    came out as arguments; names with a hyphen were not matched at all.
    """
    name = ("functions.list-files:17", "list-files", "{}")
    text = "Now:" + section(read(16, LONG), call(name[0], "{}")) + "Done."
    message = check_cuts(text, 10)
    assert (message.content, as_tuples(message)) == ("Now:Done.", [reads(16, LONG), name])
    pieces = [SECTION_BEGIN + read(0)[: -len(CALL_END)], "<|tool_call_", "end|>", SECTION_END]
    message, deltas = streamed(pieces)
    assert as_tuples(message) == [reads(0)]
    assert not any(isinstance(delta, Content) for delta in deltas)


@pytest.mark.parametrize("identifier", ["call12345", "call00001", "call_1"])
def test_sglang_25358_ids_that_are_a_word_and_digits(identifier: str) -> None:
    """sglang#25358: in later turns the model wrote `callNNNNN` for an id; the call was dropped without a word."""
    message = check_cuts(section(call(identifier, '{"path": "a.py"}'), read(3)), 30, tools=[READ, RUN])
    assert as_tuples(message) == [(identifier, "read_file", '{"path": "a.py"}'), reads(3)]
    lost = check_cuts(section(call(identifier, '{"other": 1}'), read(3)), 30, tools=[READ, RUN])
    assert (lost.content, as_tuples(lost)) == (identifier + '{"other": 1}', [reads(3)])


@pytest.mark.parametrize("before", ["", "null", "\n"])
def test_kimi_k2_41_call_without_its_section(before: str) -> None:
    """MoonshotAI/Kimi-K2#41: after complex requests the list of calls came back empty: the model had left out the
    section's begin, or had written "null" before the call.
    """
    message = check_cuts(before + read(0) + SECTION_END, 30)
    assert (message.content, as_tuples(message)) == (before, [reads(0)])
    assert message.finish_reason == "tool_calls"


def test_kimi_k2_100_calls_of_k2_thinking() -> None:
    """MoonshotAI/Kimi-K2#100: K2-Thinking behind vLLM: the agent's screen filled with raw markers after the first call,
    in the reasoning and in the answer.
    """
    text = f"{THINK}Look around. {SECTION_BEGIN} {CALL_BEGIN} functions.read_file:0 {ARGUMENT_BEGIN} {{}} {CALL_END} "
    text += f"{SECTION_END}{THINK_END} Then {SECTION_BEGIN}{read(1)}{SECTION_END}"
    message = check_cuts(text, 100)
    assert as_tuples(message) == [reads(0, " {} "), reads(1)]
    shown = message.reasoning_content + message.content
    assert not any(marker in shown for marker in SPELLINGS)
    assert (message.reasoning_content, message.content) == ("Look around. ", " Then ")


def test_kimi_k2_128_an_empty_turn_after_reasoning() -> None:
    """MoonshotAI/Kimi-K2#128: K2.6 ended its turn right after </think> in follow-ups to tool calls. The cause is the
    prompt: ids of another form, and reasoning of the chain of calls that was not put back. The empty turn itself is a
    message with reasoning, no content and finish_reason stop, not an error.
    """
    call_x = {"id": "toolu_01", "function": {"name": "run", "arguments": {"command": "ls"}}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "reasoning_content": "First ls.", "tool_calls": [call_x]},
        {"role": "tool", "tool_call_id": "toolu_01", "content": "a.py"},
    ]
    text = apply_chat_template(history, style="k2.5")
    assert f"{THINK}First ls.{THINK_END}{SECTION_BEGIN}{CALL_BEGIN}functions.run:0{ARGUMENT_BEGIN}" in text
    assert "## Return of functions.run:0\na.py<|im_end|>" in text
    assert opens_reasoning(render_segments(history, style="k2.5"))
    message = parse_message(f"All done.{THINK_END}", prefilled=True, reason="stop")
    assert (message.reasoning_content, message.content, message.finish_reason) == ("All done.", "", "stop")
    assert message.to_openai() == {"role": "assistant", "content": "", "reasoning_content": "All done."}
