"""The chat template of the Kimi-K2 family, rendered as segments so that message text cannot forge markup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.config import Int4GroupQuantization
from kimi_k2.tokenization.messages import Message, normalized, text_of
from kimi_k2.tokenization.special_tokens import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    IM_ASSISTANT,
    IM_END,
    IM_MIDDLE,
    IM_SYSTEM,
    IM_USER,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
)
from kimi_k2.tokenization.tool_declaration import checked_tools, json_declaration, typescript_declaration

DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."


class ChatStyle(str, Enum):
    """Which member of the family: they differ in how reasoning and tools are shown."""

    INSTRUCT = "instruct"
    THINKING = "thinking"
    K25 = "k2.5"

    @classmethod
    def for_config(cls, config: KimiK2Config) -> ChatStyle:
        """The style of a checkpoint: K2.5 and K2.6 prefix their tensor names, Thinking is the other INT4 one."""
        if config.tensor_prefix:
            return cls.K25
        return cls.THINKING if isinstance(config.quantization, Int4GroupQuantization) else cls.INSTRUCT


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation; only markup may contain special tokens."""

    text: str
    markup: bool


def apply_chat_template(messages: Sequence[Message], **options: Any) -> str:
    """The rendered conversation as one string; arguments and errors as for `render_segments`."""
    return "".join(segment.text for segment in render_segments(messages, **options))


def render_segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    style: ChatStyle | str = ChatStyle.INSTRUCT,
    thinking: bool = True,
    preserve_thinking: bool = False,
) -> list[Segment]:
    """Render a conversation.

    Args:
        messages: OpenAI-style: `role` (system, user, assistant, tool), `content` (text, a list of text parts, or None),
            for assistants `tool_calls` and `reasoning_content`, for tools `tool_call_id`, optionally `name`.
        tools: OpenAI-style tool definitions.
        add_generation_prompt: end with the opening of an assistant turn.
        style: see ChatStyle.
        thinking: for K2.5: whether the model is to reason.
        preserve_thinking: keep the reasoning of every turn (K2.6), not only of those since the last answer.

    Returns:
        Markup and text, alternating freely; their concatenation is the prompt.

    Raises:
        TokenizerError: naming the message and field, or the tool, that is malformed.
    """
    style = ChatStyle(style)
    checked = normalized(messages)
    definitions = checked_tools(tools)
    out: list[Segment] = []
    if definitions:
        declared = typescript_declaration(definitions) if style is ChatStyle.K25 else None
        out += _turn(IM_SYSTEM, "tool_declare", [Segment(declared or json_declaration(definitions), False)])
    if not checked or checked[0]["role"] != "system":
        out += _turn(IM_SYSTEM, "system", [Segment(DEFAULT_SYSTEM, False)])
    # Reasoning is kept for the chain of tool calls since the last answer, and emptied before it.
    answers = [i for i, m in enumerate(checked) if m["role"] == "assistant" and not m.get("tool_calls")]
    emptied_through = answers[-1] if answers and not preserve_thinking else -1
    for index, message in enumerate(checked):
        role = message["role"]
        opening = {"user": IM_USER, "assistant": IM_ASSISTANT}.get(role, IM_SYSTEM)
        if role == "assistant":
            keeps = index > emptied_through and (thinking or style is not ChatStyle.K25)
            body = _assistant_body(message, style, message.get("reasoning_content", "") if keeps else "")
        elif role == "tool":
            body = [Segment(f"## Return of {message['tool_call_id']}\n{text_of(message['content'])}", False)]
        else:
            body = [Segment(text_of(message["content"]), False)]
        out += _turn(opening, message.get("name") or role, body)
    if add_generation_prompt:
        out += [Segment(IM_ASSISTANT, True), Segment("assistant", False), Segment(IM_MIDDLE, True)]
        if style is ChatStyle.K25:
            out.append(Segment(THINK if thinking else THINK + THINK_END, True))
    return [segment for segment in out if segment.text]


def _turn(opening: str, name: str, body: list[Segment]) -> list[Segment]:
    head = [Segment(opening, True), Segment(name, False), Segment(IM_MIDDLE, True)]
    return [*head, *body, Segment(IM_END, True)]


def _assistant_body(message: Message, style: ChatStyle, reasoning: str) -> list[Segment]:
    body: list[Segment] = []
    if style is not ChatStyle.INSTRUCT:
        body += [Segment(THINK, True), Segment(reasoning, False), Segment(THINK_END, True)]
    body.append(Segment(text_of(message["content"]), False))
    calls = message.get("tool_calls") or []
    if calls:
        body.append(Segment(SECTION_BEGIN, True))
        for call in calls:
            arguments = call["function"].get("arguments", "{}")
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            body += [Segment(CALL_BEGIN, True), Segment(call["id"], False), Segment(ARGUMENT_BEGIN, True)]
            body += [Segment(arguments, False), Segment(CALL_END, True)]
        body.append(Segment(SECTION_END, True))
    return body
