"""The combined parser: reasoning, content and tool calls together, whole and streamed, and back into a prompt."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k2.tokenization.chat import ChatStyle, apply_chat_template, render_segments
from kimi_k2.tokenization.message import AssistantMessage, MessageDelta, MessageStream, opens_reasoning, parse_message
from kimi_k2.tokenization.special_tokens import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
)
from kimi_k2.tokenization.tool_calls import ToolCall

CALL = f'{CALL_BEGIN}functions.a.b:0{ARGUMENT_BEGIN}{{"q": "<x>"}}{CALL_END}'
FULL = f"{THINK}why{THINK_END}I will. {SECTION_BEGIN}{CALL}{SECTION_END} done"
EXPECTED = AssistantMessage("why", "I will.  done", [ToolCall("functions.a.b:0", "a.b", '{"q": "<x>"}')])

TEXTS = [
    (FULL, False),
    (FULL.removeprefix(THINK), True),
    (f"{THINK}calls without closing{SECTION_BEGIN}{CALL}{SECTION_END}", False),
    (f"{THINK}never ends", False),
    (f"{THINK_END}answer", True),
    (f"{THINK}a{THINK_END}{SECTION_BEGIN}{CALL_BEGIN}functions.f:0{ARGUMENT_BEGIN}{{cut", False),
    (f"{SECTION_BEGIN}{CALL}{CALL}{SECTION_END}", False),
    ("plain", False),
    ("", True),
]


def gathered(deltas: list[MessageDelta]) -> AssistantMessage:
    """What a client of OpenAI's API would assemble, abandoned calls dropped."""
    message = AssistantMessage()
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        fields = delta.to_openai()
        message.reasoning_content += fields.get("reasoning_content", "")
        message.content += fields.get("content", "")
        for change in fields.get("tool_calls", []):
            call = calls.setdefault(change["index"], {"arguments": ""})
            call.update({key: change[key] for key in ("id",) if key in change})
            call.update({key: change["function"][key] for key in ("name",) if key in change["function"]})
            call["arguments"] += change["function"]["arguments"]
        for index in delta.abandoned:
            del calls[index]
    message.tool_calls = [ToolCall(**call) for _, call in sorted(calls.items())]
    return message


def streamed(pieces: list[str], **options: Any) -> AssistantMessage:
    stream = MessageStream(**options)
    return gathered([*map(stream.feed, pieces), stream.flush()])


def test_whole_message() -> None:
    assert parse_message(FULL) == EXPECTED


@pytest.mark.parametrize("stream_arguments", [True, False])
@pytest.mark.parametrize(("text", "prefilled"), TEXTS)
def test_cut_at_every_character(text: str, prefilled: bool, stream_arguments: bool) -> None:
    whole = parse_message(text, prefilled=prefilled)
    for pieces in [[text[:cut], text[cut:]] for cut in range(len(text) + 1)] + [list(text)]:
        assert streamed(pieces, prefilled=prefilled, stream_arguments=stream_arguments) == whole


@given(
    st.lists(st.sampled_from([THINK, THINK_END, SECTION_BEGIN, SECTION_END, CALL, CALL_BEGIN, CALL_END, ARGUMENT_BEGIN,
                              "functions.f:1", "functions.:0", "{}", " ", "text", "<|", "</th"]), max_size=10),
    st.booleans(), st.booleans(), st.lists(st.integers(0, 300), max_size=4),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_any_mixture_any_cuts(pieces: list[str], prefilled: bool, stream_arguments: bool, cuts: list[int]) -> None:
    text = "".join(pieces)
    whole = parse_message(text, prefilled=prefilled)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(places)]
    assert streamed(parts, prefilled=prefilled, stream_arguments=stream_arguments) == whole
    if not whole.tool_calls and THINK not in text and not prefilled:
        assert whole.content == text


def test_openai_deltas() -> None:
    stream = MessageStream(prefilled=True)
    assert stream.feed("why") == MessageDelta(reasoning_content="why")
    assert stream.feed(f"{THINK_END}ok{SECTION_BEGIN}{CALL_BEGIN}functions.f:3{ARGUMENT_BEGIN}{{").to_openai() == {
        "content": "ok",
        "tool_calls": [
            {"index": 0, "id": "functions.f:3", "type": "function", "function": {"name": "f", "arguments": ""}},
            {"index": 0, "function": {"arguments": "{"}},
        ],
    }
    assert stream.finish_reason == "stop"
    assert stream.feed("}" + CALL_END).to_openai() == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    assert stream.finish_reason == "tool_calls"
    assert stream.flush().to_openai() == {}


@pytest.mark.parametrize("style", [ChatStyle.THINKING, ChatStyle.K25])
def test_a_parsed_message_renders_to_the_same_text(style: ChatStyle) -> None:
    text = f"{THINK}why{THINK_END}I will. {SECTION_BEGIN}{CALL}{SECTION_END}"
    prompt: list[Any] = [{"role": "user", "content": "go"}]
    opened = render_segments(prompt, style=style)
    generated = text.removeprefix(THINK) if opens_reasoning(opened) else text
    message = parse_message(generated, prefilled=opens_reasoning(opened)).to_openai()
    json.dumps(message)
    again = apply_chat_template([*prompt, message], style=style, add_generation_prompt=False)
    assert again == "".join(segment.text for segment in opened) + generated + "<|im_end|>"


def test_which_prompts_open_reasoning() -> None:
    user = [{"role": "user", "content": THINK}]
    assert opens_reasoning(render_segments(user, style="k2.5"))
    assert not opens_reasoning(render_segments(user, style="k2.5", thinking=False))
    assert not opens_reasoning(render_segments(user, style="thinking"))
    assert not opens_reasoning([])
