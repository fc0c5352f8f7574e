"""Parts that clients of other APIs send, as the chat templates know them: Anthropic's blocks, OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    if not isinstance(content, (list, tuple)) or not any(_is_foreign(part) for part in content):
        yield message
        return
    rest: list[Any] = []
    reasoning: list[str] = []
    calls: list[Any] = list(message.get("tool_calls") or ())
    has_results = False
    for number, part in enumerate(content):
        kind = part.get("type") if _is_foreign(part) else None
        where = f"message {index}: field 'content[{number}]'"
        if kind is None:
            rest.append(part)
        elif kind == "redacted_thinking":
            raise TokenizerError(f"{where}: expected reasoning in plain text, got redacted_thinking")
        elif kind in ("thinking", "reasoning"):
            reasoning.append(_text(part, (kind, "text"), where))
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            has_results = True
            result = {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content") or ""}
            yield from translated(result, index)
        elif kind in _TEXTS:
            rest.append({"type": "text", "text": _text(part, (_TEXTS[kind],), where)})
        else:
            rest.append({"type": "image_url", "image_url": {"url": _address(part, where)}})
    if has_results and not rest:
        return
    made = {**message, "content": rest or ""}
    if reasoning:
        made["reasoning_content"] = "".join(reasoning)
    if calls:
        made["tool_calls"] = calls
    yield made


def _is_foreign(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return (
        kind in ("thinking", "reasoning", "redacted_thinking", "tool_use", "tool_result", "input_image")
        or (isinstance(kind, str) and kind in _TEXTS)
        or (kind == "image" and isinstance(part.get("source"), Mapping))
    )


def _text(part: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    text = next((part[name] for name in names if part.get(name) is not None), None)
    if not isinstance(text, str):
        raise TokenizerError(f"{where}: expected text in '{names[0]}', got {type(text).__name__}")
    return text


def _address(part: Mapping[str, Any], where: str) -> str:
    source = part.get("source") or {"url": part.get("image_url")}
    kind, data = source.get("media_type"), source.get("data")
    url = f"data:{kind};base64,{data}" if isinstance(kind, str) and isinstance(data, str) else source.get("url")
    if not isinstance(url, str):
        raise TokenizerError(f"{where}: expected an image's URL, or base64 data and its media_type")
    return url
