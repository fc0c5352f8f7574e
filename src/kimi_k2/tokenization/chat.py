"""The chat template of the Kimi-K2 family, rendered as segments so that message text cannot forge markup."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import TokenizerError
from kimi_k2.quantization.config import Int4GroupQuantization
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

DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


class ChatStyle(str, Enum):
    """Which member of the family: they differ in how reasoning is shown."""

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
) -> list[Segment]:
    """Render a conversation.

    Args:
        messages: OpenAI-style: `role` (system, user, assistant, tool), `content` (text, a list of text parts, or None),
            for assistants `tool_calls` and `reasoning_content`, for tools `tool_call_id`, optionally `name`.
        tools: OpenAI-style tool definitions.
        add_generation_prompt: end with the opening of an assistant turn.
        style: see ChatStyle.
        thinking: for K2.5: whether the model is to reason.

    Returns:
        Markup and text, alternating freely; their concatenation is the prompt.

    Raises:
        TokenizerError: naming the message and field that is missing or malformed.
    """
    style = ChatStyle(style)
    checked = [_checked(message, index) for index, message in enumerate(messages)]
    out: list[Segment] = []
    if tools:
        declared = json.dumps(list(tools), ensure_ascii=False, separators=(",", ":"))
        out += _turn(IM_SYSTEM, "tool_declare", [Segment(declared, False)])
    if not checked or checked[0]["role"] != "system":
        out += _turn(IM_SYSTEM, "system", [Segment(DEFAULT_SYSTEM, False)])
    ids = _ToolCallIds()
    # Reasoning is kept for the chain of tool calls since the last answer, and emptied before it.
    answers = [i for i, m in enumerate(checked) if m["role"] == "assistant" and not m.get("tool_calls")]
    last_answer = answers[-1] if answers else -1
    for index, message in enumerate(checked):
        role = message["role"]
        opening = {"user": IM_USER, "assistant": IM_ASSISTANT}.get(role, IM_SYSTEM)
        if role == "assistant":
            keeps = thinking or style is not ChatStyle.K25
            reasoning = (message.get("reasoning_content") or "") if index > last_answer and keeps else ""
            body = _assistant_body(message, style, reasoning, ids)
        elif role == "tool":
            result = f"## Return of {ids.of_result(message, index)}\n{_text(message['content'])}"
            body = [Segment(result, False)]
        else:
            body = [Segment(_text(message["content"]), False)]
        out += _turn(opening, message.get("name") or role, body)
    if add_generation_prompt:
        out += [Segment(IM_ASSISTANT, True), Segment("assistant", False), Segment(IM_MIDDLE, True)]
        if style is ChatStyle.K25:
            out.append(Segment(THINK if thinking else THINK + THINK_END, True))
    return [segment for segment in out if segment.text]


def _turn(opening: str, name: str, body: list[Segment]) -> list[Segment]:
    head = [Segment(opening, True), Segment(name, False), Segment(IM_MIDDLE, True)]
    return [*head, *body, Segment(IM_END, True)]


def _assistant_body(message: Message, style: ChatStyle, reasoning: str, ids: _ToolCallIds) -> list[Segment]:
    body: list[Segment] = []
    if style is not ChatStyle.INSTRUCT:
        body += [Segment(THINK, True), Segment(reasoning, False), Segment(THINK_END, True)]
    body.append(Segment(_text(message["content"]), False))
    calls = message.get("tool_calls") or []
    if calls:
        body.append(Segment(SECTION_BEGIN, True))
        for call in calls:
            arguments = call["function"].get("arguments", "{}")
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            body += [Segment(CALL_BEGIN, True), Segment(ids.of_call(call), False), Segment(ARGUMENT_BEGIN, True)]
            body += [Segment(arguments, False), Segment(CALL_END, True)]
        body.append(Segment(SECTION_END, True))
    return body


class _ToolCallIds:
    """Rewrites tool-call ids to the trained form, functions.NAME:IDX, with IDX counted over the conversation."""

    def __init__(self) -> None:
        self._count = 0
        self._renamed: dict[str, str] = {}

    def of_call(self, call: Mapping[str, Any]) -> str:
        renamed = f"functions.{call['function']['name']}:{self._count}"
        self._count += 1
        if call.get("id") is not None:
            self._renamed[call["id"]] = renamed
        return renamed

    def of_result(self, message: Message, index: int) -> str:
        given = message["tool_call_id"]
        if given not in self._renamed:
            raise _error(index, "tool_call_id", f"no earlier tool call has the id {given!r}")
        return self._renamed[given]


def _error(index: int, field: str, expectation: str) -> TokenizerError:
    return TokenizerError(f"message {index}: field '{field}': {expectation}")


def _checked(message: Any, index: int) -> dict[str, Any]:
    """A message whose fields the renderer can rely on."""
    if not isinstance(message, Mapping):
        raise TokenizerError(f"message {index}: expected an object, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise _error(index, "role", f"expected one of {', '.join(ROLES)}, got {role!r}")
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise _error(index, "content", "missing")
    elif not isinstance(content, str):
        parts = content if isinstance(content, list) else [None]
        for part in parts:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise _error(index, "content", f"expected text or a list of text parts, got {part or content!r}")
    if message.get("name") is not None and not isinstance(message["name"], str):
        raise _error(index, "name", f"expected text, got {message['name']!r}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise _error(index, "tool_call_id", f"expected text, got {message.get('tool_call_id')!r}")
    if role == "assistant":
        _check_assistant(message, index)
    return {**message, "content": content}


def _check_assistant(message: Message, index: int) -> None:
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise _error(index, "reasoning_content", f"expected text, got {reasoning!r}")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise _error(index, "tool_calls", f"expected a list, got {calls!r}")
    for number, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise _error(index, f"tool_calls[{number}].function.name", "expected a function's name")


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_parts(content))


def _parts(content: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for part in content:
        yield part["text"]
