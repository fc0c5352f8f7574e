"""What the tests share: building blocks of messages, checks that hold for any text and any cuts, rendered prompts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from kimi_k2.tokenization.chat import built_in_template
from kimi_k2.tokenization.deltas import AssistantMessage, Content, Delta, collect
from kimi_k2.tokenization.lexer import SPELLINGS
from kimi_k2.tokenization.message import MessageStream, parse_message
from kimi_k2.tokenization.reasoning import ReasoningStream
from kimi_k2.tokenization.special_tokens import ARGUMENT_BEGIN, CALL_BEGIN, CALL_END, SECTION_BEGIN, SECTION_END
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.template import Segment


def call(name: str = "functions.f:0", arguments: str = '{"a": 1}') -> str:
    return f"{CALL_BEGIN}{name}{ARGUMENT_BEGIN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return SECTION_BEGIN + "".join(calls) + SECTION_END


def tool(name: str, *parameters: str) -> dict[str, Any]:
    """The first parameter is required, the others are not."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters[:1])}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def as_tuples(message: AssistantMessage) -> list[tuple[str, str, str]]:
    return [(c.id, c.name, c.arguments) for c in message.tool_calls]


def without_markers(text: str) -> str:
    return re.sub("|".join(map(re.escape, SPELLINGS)), "", text)


def streamed(pieces: Sequence[str], **options: Any) -> tuple[AssistantMessage, list[Delta]]:
    """The message of a text in pieces, and its deltas."""
    stream = MessageStream(**options)
    deltas = [delta for step in (*map(stream.feed, pieces), stream.finish()) for delta in step]
    return collect(deltas, str(stream.finish_reason)), deltas


def in_two(pieces: Sequence[str], prefilled: bool = False, **options: Any) -> AssistantMessage:
    """The same by two parsers, as engines have them: one takes the reasoning, the other what it leaves."""
    first, second = ReasoningStream(prefilled=prefilled), MessageStream(after_reasoning=True, **options)
    splits = [*map(first.feed, pieces), first.feed("", last=True)]
    assert all(split.closed for split in splits[:-1] if split.content)
    message = collect([delta for split in splits for delta in second.feed(split.content)] + second.finish())
    message.reasoning_content += "".join(split.reasoning for split in splits)
    message.finish_reason = str(second.finish_reason) if splits[-1].closed else "length"
    return message


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = [*sorted(min(place, len(text)) for place in places), len(text)]
    starts = [0, *ends[:-1]]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def check_cuts(text: str, count: int, seed: int = 0, **options: Any) -> AssistantMessage:
    """The whole message, after `count` random ways of cutting the text gave the same, with no markup in content."""
    whole = parse_message(text, **options)
    check_nothing_is_lost(text, whole)
    draw = random.Random(seed)
    cuts = [[draw.randrange(len(text) + 1) for _ in range(draw.choice((1, 1, 2, 5, 30)))] for _ in range(count)]
    for places in [*cuts, list(range(len(text)))]:
        message, deltas = streamed(cut(text, places), **options)
        assert message == whole, places
        for delta in deltas:
            assert not isinstance(delta, Content) or without_markers(delta.text) == delta.text
    return whole


def check_nothing_is_lost(text: str, message: AssistantMessage) -> None:
    """Every character but markers and white space is reasoning, content, or a call's id or arguments, once."""

    def characters(text: str) -> list[str]:
        return sorted("".join(without_markers(text).split()))

    texts = [message.reasoning_content, message.content, *(c.id + c.arguments for c in message.tool_calls)]
    assert characters("".join(texts)) == characters(text)
    assert without_markers(message.content) == message.content


def render_segments(messages: Any, *, style: str = "instruct", **options: Any) -> list[Segment]:
    """A conversation in a style's built-in template."""
    return built_in_template(ChatStyle(style)).render_segments(messages, style=style, **options)


def apply_chat_template(messages: Any, **options: Any) -> str:
    return "".join(segment.text for segment in render_segments(messages, **options))
