"""Chat messages as every renderer takes them: checked, and with tool-call ids in the form that Kimi was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_k2.errors import TokenizerError

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


def normalized(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of OpenAI-style messages, checked, with ids rewritten to functions.NAME:IDX.

    IDX counts the tool calls from 0 over the conversation. Fields that are None are left out, except `content`, which
    is always there: text, a list of text parts, or None for an assistant.

    Raises:
        TokenizerError: naming the message and the field that is missing or malformed.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TokenizerError(f"messages: expected a list, got {type(messages).__name__}")
    ids = _ToolCallIds()
    return [ids.rewrite(_checked(message, index), index) for index, message in enumerate(messages)]


def text_of(content: Any) -> str:
    """The text of checked content; parts are joined without a separator."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content)


class _ToolCallIds:
    """New ids of a conversation's tool calls, in the order of the calls, and what they were called before."""

    def __init__(self) -> None:
        self._count = 0
        self._renamed: dict[str, str] = {}

    def rewrite(self, message: dict[str, Any], index: int) -> dict[str, Any]:
        if message["role"] == "tool":
            given = message["tool_call_id"]
            if given not in self._renamed:
                raise _error(index, "tool_call_id", f"no earlier tool call has the id {given!r}")
            return {**message, "tool_call_id": self._renamed[given]}
        if message.get("tool_calls"):
            return {**message, "tool_calls": [self._rewrite_call(call) for call in message["tool_calls"]]}
        return message

    def _rewrite_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        renamed = f"functions.{call['function']['name']}:{self._count}"
        self._count += 1
        if call.get("id") is not None:
            self._renamed[call["id"]] = renamed
        return {**call, "id": renamed}


def _error(index: int, field: str, expectation: str) -> TokenizerError:
    return TokenizerError(f"message {index}: field '{field}': {expectation}")


def _checked(message: Any, index: int) -> dict[str, Any]:
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
    return {**{key: value for key, value in message.items() if value is not None}, "content": content}


def _check_assistant(message: Message, index: int) -> None:
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise _error(index, "reasoning_content", f"expected text, got {reasoning!r}")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise _error(index, "tool_calls", f"expected a list, got {calls!r}")
    for number, call in enumerate(calls or ()):
        where = f"tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise _error(index, f"{where}.function.name", "expected a function's name")
        if not isinstance(function.get("arguments", ""), (str, Mapping)):
            raise _error(index, f"{where}.function.arguments", "expected JSON text or an object")
        if call.get("id") is not None and not isinstance(call["id"], str):
            raise _error(index, f"{where}.id", f"expected text, got {call['id']!r}")
