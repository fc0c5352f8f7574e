"""Chat messages as every renderer takes them: checked, and with tool-call ids in the form that Kimi was trained on.

And parts that clients of other APIs send, as the chat templates know them: Anthropic's blocks, OpenAI's Responses.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from reprlib import repr as shown
from typing import Any

from kimi_k2.errors import TokenizerError

_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}


def translated(message: Any, index: int) -> Iterator[Any]:
    """The messages that a client's message stands for; one that has none of these parts is given back as it is.

    Reasoning (`thinking`, `reasoning`) becomes the message's `reasoning_content`, `tool_use` its `tool_calls`; each
    `tool_result` becomes a message of its own before the rest; `input_text`, `output_text` and `refusal` become text,
    `input_image` and Anthropic's images `image_url`.

    Raises:
        TokenizerError: a part is malformed, or holds reasoning that only its maker can read.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        yield message
        return
    rest: list[Any] = []
    reasoning: list[str] = []
    calls = _calls(message, index)
    has_results = False
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        where = f"message {index}: field 'content[{number}]'"
        if kind == "redacted_thinking":
            raise TokenizerError(f"{where}: expected reasoning in plain text, got redacted_thinking")
        if kind in ("thinking", "reasoning"):
            reasoning.append(_text(part, (kind, "text"), where))
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            has_results = True
            result = {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content") or ""}
            yield from translated(result, index)
        elif isinstance(kind, str) and kind in _TEXTS:
            rest.append({"type": "text", "text": _text(part, (_TEXTS[kind],), where)})
        elif kind == "input_image" or (kind == "image" and isinstance(part.get("source"), Mapping)):
            rest.append({"type": "image_url", "image_url": {"url": _address(part, where)}})
        else:
            rest.append(part)
    if all(map(operator.is_, rest, content)) and len(rest) == len(content):
        yield message
        return
    if has_results and not rest:
        return
    rewritten = {**message, "content": rest or ""}
    if reasoning:
        rewritten["reasoning_content"] = "".join(reasoning)
    if calls:
        rewritten["tool_calls"] = calls
    yield rewritten


def _text(part: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    text = next((part[name] for name in names if part.get(name) is not None), None)
    if not isinstance(text, str):
        raise TokenizerError(f"{where}: expected text in '{names[0]}', got {type(text).__name__}")
    return text


def _address(part: Mapping[str, Any], where: str) -> str:
    source = part.get("source") or {"url": part.get("image_url")}
    source = source if isinstance(source, Mapping) else {}
    kind, data = source.get("media_type"), source.get("data")
    url = f"data:{kind};base64,{data}" if isinstance(kind, str) and isinstance(data, str) else source.get("url")
    if not isinstance(url, str):
        raise TokenizerError(f"{where}: expected an image's URL, or base64 data and its media_type")
    return url


# `developer` is what newer clients call `system`; the published templates open it as a system turn of that name.
ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGE_PARTS = ("image", "image_url")
VIDEO_PARTS = ("video", "video_url")
# Clients' names for an assistant's reasoning; the first that is there counts.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]

_TRAINED_ID = re.compile(r"functions\.\S+:(\d{1,9})", re.ASCII)


def normalized(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of OpenAI-style messages, checked, with ids rewritten to functions.NAME:IDX.

    IDX counts the tool calls from 0 over the conversation. A result whose call is not there (a history that was cut)
    keeps its id if that has the trained form, and later calls count on from there; another id gets that form if the
    result has a `name`. As in transformers, fields that are None are left out, and reasoning is there under the names
    that templates read. Parts of other APIs are translated (`translated`). All is plain data: a medium that is no
    text becomes the name of its type.

    Raises:
        TokenizerError: naming the message and the field that is missing or malformed.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TokenizerError(f"messages: expected a list, got {type(messages).__name__}")
    ids = _ToolCallIds()
    translations = ((each, index) for index, message in enumerate(messages) for each in translated(message, index))
    return [ids.rewrite(_checked(message, index)) for message, index in translations]


class _ToolCallIds:
    """New ids of a conversation's tool calls, in the order of the calls, and what they were called before."""

    def __init__(self) -> None:
        self._count = 0
        self._renamed: dict[str, str] = {}

    def rewrite(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool":
            old_id = message["tool_call_id"]
            if old_id not in self._renamed:
                self._renamed[old_id] = self._orphan(old_id, message.get("name"))
            return {**message, "tool_call_id": self._renamed[old_id]}
        if message["role"] == "assistant" and message.get("tool_calls"):
            return {**message, "tool_calls": [self._rewrite_call(call) for call in message["tool_calls"]]}
        return message

    def _orphan(self, old_id: str, name: str | None) -> str:
        index = _TRAINED_ID.fullmatch(old_id)
        if index:
            self._count = max(self._count, int(index[1]) + 1)
            return old_id
        return self._next(name) if name else old_id

    def _rewrite_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        renamed = self._next(call["function"]["name"])
        if call.get("id") is not None:
            self._renamed[call["id"]] = renamed
        return {**call, "id": renamed}

    def _next(self, name: str) -> str:
        self._count += 1
        return f"functions.{name}:{self._count - 1}"


def _error(index: int, field: str, expectation: str) -> TokenizerError:
    return TokenizerError(f"message {index}: field '{field}': {expectation}")


def _check_text(holder: Message, name: str, index: int, place: str = "", *, optional: bool = True) -> None:
    value = holder.get(name)
    if not isinstance(value, str) and not (optional and value is None):
        raise _error(index, f"{place}{name}", f"expected text, got {shown(value)}")


def _checked(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TokenizerError(f"message {index}: expected an object, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise _error(index, "role", f"expected one of {', '.join(ROLES)}, got {shown(role)}")
    content = message.get("content")
    if content is None:
        if role != "assistant" and "content" not in message:
            raise _error(index, "content", "missing")
    elif not isinstance(content, str):
        if not isinstance(content, (list, tuple)):
            raise _error(index, "content", f"expected text or a list of parts, got {type(content).__name__}")
        for number, part in enumerate(content):
            if not isinstance(part, Mapping) or (part_kind(part) is None and not isinstance(part.get("text"), str)):
                raise _error(index, f"content[{number}]", f"expected a part of text, image or video, got {shown(part)}")
    _check_text(message, "name", index)
    if role == "tool":
        _check_text(message, "tool_call_id", index, optional=False)
    if role == "assistant":
        _check_assistant(message, index)
    fields = {
        key: plain_data(value, f"message {index}: field '{key}'") for key, value in message.items() if value is not None
    }
    reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def plain_data(value: Any, where: str, *, is_medium: bool = False) -> Any:
    """A copy in JSON's types alone (and tuples): a template must not get at the methods of other objects.

    Raises:
        TokenizerError: something in it is of another type and no medium, which becomes the name of its type.
    """
    if value is None or type(value) in (bool, str, int, float):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        is_medium = is_medium or part_kind(value) is not None
        return {plain_data(key, where): plain_data(item, where, is_medium=is_medium) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_data(item, where, is_medium=is_medium) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if is_medium:
        return f"<{type(value).__name__}>"
    raise TokenizerError(f"{where}: expected JSON's text, numbers, lists and objects, got {type(value).__name__}")


def part_kind(part: Mapping[Any, Any]) -> str | None:
    """`image` or `video` for a part that is one by its `type`, or, without a type, by what it holds."""
    for kind, names in (("image", IMAGE_PARTS), ("video", VIDEO_PARTS)):
        part_type = part.get("type")
        if part_type in names if part_type else any(part.get(name) for name in names):
            return kind
    return None


def _calls(message: Message, index: int) -> list[Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple, type(None))):
        raise _error(index, "tool_calls", f"expected a list, got {shown(calls)}")
    return list(calls or ())


def function_of(holder: Any) -> Mapping[str, Any] | None:
    """The function of a call or of a tool's definition, if it has a name."""
    function = holder.get("function") if isinstance(holder, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return function if isinstance(name, str) and name else None


def _check_assistant(message: Message, index: int) -> None:
    for name in REASONING_FIELDS:
        _check_text(message, name, index)
    for number, call in enumerate(_calls(message, index)):
        where = f"tool_calls[{number}]"
        if (function := function_of(call)) is None:
            raise _error(index, f"{where}.function.name", "expected a function's name")
        if not isinstance(function.get("arguments"), (str, Mapping, type(None))):
            raise _error(index, f"{where}.function.arguments", "expected JSON text or an object")
        _check_text(call, "id", index, f"{where}.")
