"""The chat template: exact strings of the published format, reasoning rules, tool ids, and bad messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization.chat import DEFAULT_SYSTEM, ChatStyle, apply_chat_template
from kimi_k2.tokenization.tool_calls import parse_tool_calls

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = {"id": "call_x", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Beijing"}'}}


def test_published_form_of_a_plain_turn() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert apply_chat_template(messages) == (
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_default_system_prompt_and_no_bos() -> None:
    text = apply_chat_template([{"role": "user", "content": "U"}], add_generation_prompt=False)
    assert text == f"<|im_system|>system<|im_middle|>{DEFAULT_SYSTEM}<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>"


def test_published_form_of_a_tool_round_trip() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_x", "name": "get_weather", "content": '{"weather": "Sunny"}'},
    ]
    assert apply_chat_template(messages, tools=TOOLS) == (
        '<|im_system|>tool_declare<|im_middle|>[{"function":{"name":"get_weather","parameters":{"type":"object"}},'
        '"type":"function"}]<|im_end|>'
        f"<|im_system|>system<|im_middle|>{DEFAULT_SYSTEM}<|im_end|><|im_user|>user<|im_middle|>Weather?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Beijing"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        '<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:0\n{"weather": "Sunny"}<|im_end|>'
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_tool_ids_count_over_the_conversation() -> None:
    def call(name: str, identifier: str) -> dict[str, Any]:
        return {"id": identifier, "function": {"name": name, "arguments": {"a": 1}}}

    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [call("a", "x"), call("b", "y")]},
        {"role": "tool", "tool_call_id": "y", "content": "2"},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
        {"role": "assistant", "content": "more", "tool_calls": [call("a", "functions.a:0")]},
        {"role": "tool", "tool_call_id": "functions.a:0", "content": "3"},
    ]
    text = apply_chat_template(messages)
    returns = [line.split("## Return of ")[1] for line in text.split("\n") if "## Return of " in line]
    assert returns == ["functions.b:1", "functions.a:0", "functions.a:2"]
    turns = [turn for turn in text.split("<|im_end|>") if "assistant<|im_middle|>" in turn]
    parsed = parse_tool_calls(turns[0].partition("assistant<|im_middle|>")[2])
    assert [(c.id, c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [
        ("functions.a:0", "a", {"a": 1}), ("functions.b:1", "b", {"a": 1})]  # fmt: skip


def history() -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one", "reasoning_content": "old"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "", "reasoning_content": "new", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_x", "content": "r"},
    ]


def assistant_turns(text: str) -> list[str]:
    return [turn.split("assistant<|im_middle|>")[1] for turn in text.split("<|im_assistant|>")[1:]]


def test_thinking_keeps_reasoning_after_the_last_answer_only() -> None:
    old, new, prompt = assistant_turns(apply_chat_template(history(), style="thinking"))
    assert old.startswith("<think></think>one<|im_end|>")
    assert new.startswith("<think>new</think><|tool_calls_section_begin|>")
    assert prompt == ""


def test_k25_prefills_think_or_switches_it_off() -> None:
    _, new, prompt = assistant_turns(apply_chat_template(history(), style=ChatStyle.K25))
    assert new.startswith("<think>new</think>")
    assert prompt == "<think>"
    _, new, prompt = assistant_turns(apply_chat_template(history(), style=ChatStyle.K25, thinking=False))
    assert new.startswith("<think></think>")
    assert prompt == "<think></think>"


def test_k26_preserves_all_reasoning_on_request() -> None:
    old, new, _ = assistant_turns(apply_chat_template(history(), style=ChatStyle.K25, preserve_thinking=True))
    assert old.startswith("<think>old</think>one<|im_end|>")
    assert new.startswith("<think>new</think>")
    silent = apply_chat_template(history(), style=ChatStyle.K25, preserve_thinking=True, thinking=False)
    assert "old" not in silent
    assert "new" not in silent


def test_k25_declares_tools_in_typescript() -> None:
    text = apply_chat_template([{"role": "user", "content": "U"}], tools=TOOLS, style=ChatStyle.K25)
    assert "type get_weather = (_: {}) => any;" in text.split("<|im_end|>")[0]
    unsupported = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"oneOf": []}}}}}]
    text = apply_chat_template([{"role": "user", "content": "U"}], tools=unsupported, style=ChatStyle.K25)
    assert text.startswith('<|im_system|>tool_declare<|im_middle|>[{"function":{"name":"f",')


def test_instruct_shows_no_think_tags() -> None:
    assert "think" not in apply_chat_template(history())


@pytest.mark.parametrize(
    ("preset", "style"),
    [("kimi-k2-instruct-0905", "instruct"), ("kimi-k2-thinking", "thinking"), ("kimi-k2.5", "k2.5")],
)
def test_style_of_each_member(preset: str, style: str) -> None:
    assert KimiK2Config.from_preset(preset).chat_style == style


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<|im_middle|>ab<|im_end|>" in apply_chat_template([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "expected an object"),
        ({"content": "x"}, "field 'role'"),
        ({"role": "robot", "content": "x"}, "field 'role'"),
        ({"role": "user"}, "field 'content': missing"),
        ({"role": "user", "content": 3}, "field 'content'"),
        ({"role": "user", "content": [{"type": "image"}]}, "field 'content'"),
        ({"role": "user", "content": "x", "name": 3}, "field 'name'"),
        ({"role": "tool", "content": "x"}, "field 'tool_call_id'"),
        ({"role": "tool", "content": "x", "tool_call_id": "nope"}, "no earlier tool call"),
        ({"role": "assistant", "content": "x", "reasoning_content": 1}, "field 'reasoning_content'"),
        ({"role": "assistant", "tool_calls": {}}, "field 'tool_calls'"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, r"tool_calls\[0\]\.function\.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, r"tool_calls\[0\]\.function\.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, "function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": "f"}}]}, r"tool_calls\[0\]\.id"),
    ],
)
def test_bad_messages_are_named(message: Any, field: str) -> None:
    with pytest.raises(TokenizerError, match=f"^message 1: .*{field}"):
        apply_chat_template([{"role": "user", "content": "ok"}, message])


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "x"}, 3])
def test_messages_that_are_no_list(messages: Any) -> None:
    with pytest.raises(TokenizerError, match=r"^messages: expected a list"):
        apply_chat_template(messages)
