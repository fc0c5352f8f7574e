"""The chat template: exact strings of the published format, reasoning rules, tool ids, and bad messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from parser_cases import apply_chat_template, render_segments

from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization.chat import DEFAULT_SYSTEM
from kimi_k2.tokenization.message import parse_message
from kimi_k2.tokenization.style import ChatStyle

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = {"id": "call_x", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Beijing"}'}}
UNSUPPORTED = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"oneOf": []}}}}}]
SYSTEM = f"<|im_system|>system<|im_middle|>{DEFAULT_SYSTEM}<|im_end|>"
ASKED = "<|im_user|>user<|im_middle|>U<|im_end|>"
OPENED = "<|im_assistant|>assistant<|im_middle|>"
USER = {"role": "user", "content": "U"}


def history(reasoning: str = "reasoning_content") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one", "reasoning_content": "old"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "", reasoning: "new", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_x", "content": "r"},
    ]


CONTRADICTING = history("reasoning")
CONTRADICTING[3]["reasoning_content"] = "other"
ONE, NEW = "one<|im_end|>", "<think>new</think><|tool_calls_section_begin|>"


# What a prompt is, or where the last three turns of the assistant, the last of them opened, begin.
@pytest.mark.parametrize(("messages", "options", "expected"), [
    ([{"role": "system", "content": "S"}, USER], {},
     f"<|im_system|>system<|im_middle|>S<|im_end|>{ASKED}{OPENED}"),
    ([USER], {"add_generation_prompt": False}, SYSTEM + ASKED),
    ([{"role": "developer", "content": None}], {"add_generation_prompt": False},
     f"{SYSTEM}<|im_system|>developer<|im_middle|><|im_end|>"),
    ([USER], {"style": "k2.5"}, f"{ASKED}{OPENED}<think>"),
    # Dumps of pydantic and Arrow have all fields, most of them null: a part goes by its type.
    ([{"role": "user", "content": [{"type": "text", "text": "U", "image_url": None, "video_url": None, "image": "a"}]}],
     {"style": "k2.5"}, f"{ASKED}{OPENED}<think>"),
    ([USER, {"role": "assistant", "content": "A", "name": None, "reasoning_content": None, "tool_calls": None}],
     {"style": "k2.5", "preserve_thinking": True, "add_generation_prompt": False},
     f"{ASKED}{OPENED}<think></think>A<|im_end|>"),
    ([USER], {"style": "k2.5", "tools": UNSUPPORTED}, "<|im_system|>tool_declare<|im_middle|>"
     '[{"function":{"name":"f","parameters":{"properties":{"a":{"oneOf":[]}}}},"type":"function"}]<|im_end|>'
     f"{ASKED}{OPENED}<think>"),
    ([USER], {"style": "k2.5", "tools": TOOLS}, "<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\n"
     f"namespace functions {{\ntype get_weather = (_: {{}}) => any;\n}}\n<|im_end|>{ASKED}{OPENED}<think>"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}],
     {"add_generation_prompt": False}, f"{SYSTEM}{OPENED}<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
     "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"),
    ([{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
      {"role": "tool", "tool_call_id": "call_x", "name": "get_weather", "content": '{"weather": "Sunny"}'}],
     {"tools": TOOLS}, '<|im_system|>tool_declare<|im_middle|>[{"function":{"name":"get_weather","parameters":'
     f'{{"type":"object"}}}},"type":"function"}}]<|im_end|>{SYSTEM}<|im_user|>user<|im_middle|>Weather?<|im_end|>'
     f"{OPENED}<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
     '<|tool_call_argument_begin|>{"city": "Beijing"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
     '<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:0\n{"weather": "Sunny"}<|im_end|>'
     f"{OPENED}"),
    (history(), {}, [ONE, NEW.partition("</think>")[2], ""]),
    (history(), {"style": "thinking"}, [f"<think></think>{ONE}", NEW, ""]),
    (history(), {"style": "k2.5"}, [f"<think></think>{ONE}", NEW, "<think>"]),
    (history(), {"style": "k2.5", "thinking": False}, [f"<think></think>{ONE}", "<think></think>", "<think></think>"]),
    (history(), {"style": "k2.5", "preserve_thinking": True}, [f"<think>old</think>{ONE}", NEW, "<think>"]),
    # As published: what is asked to be kept is kept.
    (history(), {"style": "k2.5", "preserve_thinking": True, "thinking": False},
     [f"<think>old</think>{ONE}", NEW, "<think></think>"]),
    (history(), {"style": "k2.7"}, [f"<think>old</think>{ONE}", NEW, "<think>"]),
    (history(), {"style": "k2.7", "preserve_thinking": False}, [f"<think></think>{ONE}", NEW, "<think>"]),
    (history("reasoning"), {"style": "thinking"}, [f"<think></think>{ONE}", NEW, ""]),
    (CONTRADICTING, {"style": "k2.5"}, [f"<think></think>{ONE}", NEW, "<think>"]),
])  # fmt: skip
def test_published_forms(messages: list[dict[str, Any]], options: dict[str, Any], expected: str | list[str]) -> None:
    text = apply_chat_template(messages, **options)
    if isinstance(expected, str):
        assert text == expected
    else:
        turns = text.split(OPENED)[1:]
        assert all(turn.startswith(begin) for turn, begin in zip(turns, expected, strict=True)), turns
        assert turns[2] == expected[2]


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
    parsed = parse_message(turns[0].partition("assistant<|im_middle|>")[2])
    assert [(c.id, c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [
        ("functions.a:0", "a", {"a": 1}), ("functions.b:1", "b", {"a": 1})]  # fmt: skip


IMAGE = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"


@pytest.mark.parametrize("part", [
    {"type": "image"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"image": "x.png"},
    {"image_url": "x.png"}, {"type": "image_url", "image_url": {"url": b"GIF89a"}},
])  # fmt: skip
@pytest.mark.parametrize("style", ChatStyle)
def test_images_are_media_tokens(part: dict[str, Any], style: ChatStyle) -> None:
    message: dict[str, Any] = {"role": "user", "content": [part, {"type": "text", "text": "<|media_pad|>What?"}, part]}
    assert f"user<|im_middle|>{IMAGE}\n<|media_pad|>What?{IMAGE}\n<|im_end|>" in apply_chat_template(
        [message], style=style
    )
    markup = [segment.text for segment in render_segments([message], style=style) if segment.markup]
    assert markup.count("<|media_pad|>") == 2


def orphan(identifier: str, **fields: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": "r", **fields}


def test_results_without_their_calls_are_kept() -> None:
    """A history that was cut at its beginning: ids stay, and those of later calls do not repeat them."""
    messages: list[dict[str, Any]] = [
        orphan("functions.f:4"), orphan("functions.e:1"), orphan("call_x"),
        orphan("call_y", name="g"), orphan("call_y", name="g"),
        {"role": "assistant", "tool_calls": [{**CALL, "arguments": None}]}, orphan("call_x"),
        {"role": "tool", "tool_call_id": "call_x", "content": None},
    ]  # fmt: skip
    text = apply_chat_template(messages)
    ids = [result.split("\n")[0] for result in text.split("## Return of ")[1:]]
    assert ids[:5] == ["functions.f:4", "functions.e:1", "call_x", "functions.g:5", "functions.g:5"]
    assert ids[5:] == ["functions.get_weather:6"] * 2
    assert "<|tool_call_begin|>functions.get_weather:6<|tool_call_argument_begin|>" in text


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "expected an object"),
        ({"content": "x"}, "field 'role'"),
        ({"role": "robot", "content": "x"}, "field 'role'"),
        ({"role": "user"}, "field 'content': missing"),
        ({"role": "user", "content": 3}, "field 'content'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, r"field 'content\[0\]'.*'input_audio'"),
        ({"role": "user", "content": [{"text": "x"}, 3]}, r"field 'content\[1\]'"),
        ({"role": "user", "content": "x", "name": 3}, "field 'name'"),
        ({"role": "tool", "content": "x"}, "field 'tool_call_id'"),
        ({"role": "tool", "content": "x", "tool_call_id": ["x" * 5000] * 5000}, "field 'tool_call_id'.{0,300}$"),
        ({"role": "assistant", "content": "x", "reasoning_content": 1}, "field 'reasoning_content'"),
        ({"role": "assistant", "tool_calls": {}}, "field 'tool_calls'"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, r"tool_calls\[0\]\.function\.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, r"tool_calls\[0\]\.function\.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, "function.arguments"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}, "function.arguments"),
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


THOUGHT_AND_CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "Look.", "reasoning_content": "why",
     "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {"a": 1}}},
                    {"id": "y", "function": {"name": "g", "arguments": {}}}]},
    {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "r"}, {"type": "image"}]},
    {"role": "user", "content": [{"type": "text", "text": "and?"}]},
]  # fmt: skip
SHOWN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
ANTHROPICS: list[dict[str, Any]] = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "text", "text": "Look."},
        {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "y", "name": "g", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "r"}, SHOWN]},
        {"type": "text", "text": "and?"}]},
]  # fmt: skip
ALONE = [*ANTHROPICS[:2], {"role": "user", "content": ANTHROPICS[2]["content"][:1]}, THOUGHT_AND_CALLED[3]]
CALLS = THOUGHT_AND_CALLED[1]["tool_calls"]
BOTH_KINDS = {**ANTHROPICS[1], "tool_calls": CALLS[:1], "content": [
    part for part in ANTHROPICS[1]["content"] if part.get("id") != "x"]}  # fmt: skip
RESPONSES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
    {"role": "assistant", "tool_calls": CALLS, "content": [
        {"type": "reasoning", "text": "why"}, {"type": "output_text", "text": "Look."}]},
    {"role": "tool", "tool_call_id": "x", "content": [
        {"type": "input_text", "text": "r"}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
]  # fmt: skip


@pytest.mark.parametrize("messages", [ANTHROPICS, ALONE, RESPONSES, [ANTHROPICS[0], BOTH_KINDS, ANTHROPICS[2]]])
@pytest.mark.parametrize("style", ChatStyle)
def test_parts_of_other_apis_are_the_same_conversation(messages: list[dict[str, Any]], style: ChatStyle) -> None:
    assert render_segments(messages, style=style) == render_segments(THOUGHT_AND_CALLED, style=style)


@pytest.mark.parametrize(("part", "says"), [
    ({"type": "redacted_thinking", "data": "x"}, "expected reasoning in plain text, got redacted_thinking"),
    ({"type": "thinking", "thinking": 3}, "expected text in 'thinking', got int"),
    ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "expected an image's URL"),
    ({"type": "input_image", "source": "a.png"}, "expected an image's URL"),
    ({"type": "tool_use", "id": "x", "input": {}}, r"tool_calls\[0\]\.function\.name"),
])  # fmt: skip
def test_malformed_parts_of_other_apis_are_named(part: dict[str, Any], says: str) -> None:
    with pytest.raises(TokenizerError, match=f"message 0: .*{says}"):
        apply_chat_template([{"role": "assistant", "content": [part]}])
    with pytest.raises(TokenizerError, match="message 0: field 'tool_calls': expected a list, got 5"):
        apply_chat_template([{"role": "assistant", "content": [part], "tool_calls": 5}])
