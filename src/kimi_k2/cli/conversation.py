"""Conversations and tools as files: JSON in the shapes of OpenAI's API."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_k2.errors import TokenizerError
from kimi_k2.files import Json, parse_json, replace_file

Messages = list[Json]
MAX_BYTES = 100 * 2**20


def read_messages(path: Path) -> tuple[Messages, Messages]:
    """Messages and tools of a file: a list of messages, or an object with `messages` and perhaps `tools`.

    Args:
        path: of the file; `-` is standard input.

    Raises:
        TokenizerError: it cannot be read, is no JSON or has another shape. What a message holds is checked when it is
            rendered.
    """
    content = _read_json(path)
    if isinstance(content, dict) and "messages" in content:
        return _objects(path, "messages", content["messages"]), _objects(path, "tools", content.get("tools") or [])
    return _objects(path, "messages", content), []


def read_tools(path: Path) -> Messages:
    """Tool definitions of a file: a list, or an object with `tools`; errors as for `read_messages`."""
    content = _read_json(path)
    return _objects(path, "tools", content["tools"] if isinstance(content, dict) and "tools" in content else content)


def with_system(messages: Messages, system: str | None) -> Messages:
    """The messages with this system prompt instead of their own; as they are if it is None."""
    if system is None:
        return messages
    rest = [message for message in messages if message.get("role") != "system"]
    return [{"role": "system", "content": system}, *rest]


def user_message(text: str, images: Sequence[Path] = (), videos: Sequence[Path] = ()) -> Json:
    """A user's message; pictures and films stand before the text."""
    media: list[Json] = [{"type": "image", "image": str(path)} for path in images]
    media += [{"type": "video", "video": str(path)} for path in videos]
    return {"role": "user", "content": [*media, {"type": "text", "text": text}] if media else text}


def write_conversation(path: Path, messages: Messages, tools: Messages) -> None:
    """Write what `read_messages` reads."""
    content = {"messages": messages, **({"tools": tools} if tools else {})}
    replace_file(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _read_json(path: Path) -> Any:
    name = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            text = sys.stdin.read(MAX_BYTES + 1)
        else:
            with path.open(encoding="utf-8") as file:
                text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise TokenizerError(f"{name}: expected at most {MAX_BYTES:,} characters")
        return parse_json(text.encode())
    except OSError as error:
        raise TokenizerError(f"{name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TokenizerError(f"{name}: no valid JSON: {error}") from None


def _objects(path: Path, field: str, value: Any) -> Messages:
    if not isinstance(value, list) or (not value and field == "messages"):
        raise TokenizerError(f"{path}: {field}: expected a list of objects, got {type(value).__name__}")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise TokenizerError(f"{path}: {field}[{index}]: expected an object, got {type(item).__name__}")
    return value
