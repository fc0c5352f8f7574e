"""What a message parser yields: typed pieces of an assistant message, and the message that they make up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A tool call begins; `index` counts the calls of the message from 0, `id` is as the model wrote it."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments, the raw text (usually JSON)."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A call ends; not `complete` if the text ended, or went on with something else, before the call's end marker."""

    index: int
    complete: bool = True


Delta = Reasoning | Content | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass
class ToolCall:
    """A tool call: its id as the model wrote it, the function's name, the raw arguments, whether it was ended."""

    id: str
    name: str
    arguments: str
    complete: bool = True

    def problem(self) -> str | None:
        """What is wrong with the call, in a few words: cut off, or arguments that are no JSON object; else None."""
        if not self.complete:
            return "the call was cut off before its end"
        try:
            parsed = json.loads(self.arguments)
        except ValueError as error:
            return f"the arguments are no JSON: {error}"
        except RecursionError:
            return "the arguments are JSON nested too deeply to be read"
        return None if isinstance(parsed, dict) else f"the arguments are no JSON object but {type(parsed).__name__}"


@dataclass
class AssistantMessage:
    """A parsed message.

    Attributes:
        finish_reason: OpenAI's: `stop`, `tool_calls`, or `length` if it was cut off.
    """

    reasoning_content: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = "stop"

    def to_openai(self) -> dict[str, Any]:
        """The message as OpenAI's API returns it, and as it may be put back into a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


def collect(deltas: Iterable[Delta], finish_reason: str = "stop") -> AssistantMessage:
    """The message that a stream's deltas make up."""
    texts: dict[type, list[str]] = {Reasoning: [], Content: []}
    calls: list[ToolCall] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, (Reasoning, Content)):
            texts[type(delta)].append(delta.text)
        elif isinstance(delta, ToolCallStart):
            calls.append(ToolCall(delta.id, delta.name, "", False))
            arguments.append([])
        elif isinstance(delta, ToolCallArguments):
            arguments[delta.index].append(delta.text)
        else:
            calls[delta.index].complete = delta.complete
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    reasoning, content = map("".join, texts.values())
    return AssistantMessage(reasoning, content, calls, finish_reason)


def openai_delta(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The `delta` object that OpenAI's API streams behind the reasoning: only fields with something in them."""
    content: list[str] = []
    changes: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, Content):
            content.append(delta.text)
        elif isinstance(delta, ToolCallStart):
            function = {"name": delta.name, "arguments": ""}
            changes.append({"index": delta.index, "id": delta.id, "type": "function", "function": function})
        elif isinstance(delta, ToolCallArguments):
            if not changes or changes[-1]["index"] != delta.index:
                changes.append({"index": delta.index, "function": {"arguments": ""}})
            changes[-1]["function"]["arguments"] += delta.text
    said = {"content": "".join(content), "tool_calls": changes}
    return {name: value for name, value in said.items() if value}


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbouring text of one kind joined, empty text left out."""
    result: list[Delta] = []
    for kind, group in groupby(deltas, type):
        run: list[Any] = list(group)
        if kind in (ToolCallStart, ToolCallEnd):
            result += run
        elif text := "".join(delta.text for delta in run):
            result.append(replace(run[0], text=text))
    return result
