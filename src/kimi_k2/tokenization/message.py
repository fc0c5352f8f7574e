"""Parser of a whole assistant message: reasoning, content and tool calls at once, in the shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_k2.tokenization.reasoning import ReasonedText, ReasoningStream
from kimi_k2.tokenization.special_tokens import THINK
from kimi_k2.tokenization.template import Segment
from kimi_k2.tokenization.tool_calls import (
    Content,
    Event,
    ToolCall,
    ToolCallAbandoned,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolCallStream,
    collect,
)


@dataclass(frozen=True)
class ToolCallDelta:
    """A change of one tool call: its id and name come first, then arguments in pieces.

    Attributes:
        index: counts the calls that were started, from 0.
        id, name: set in the first delta of a call only.
        arguments: more of the arguments.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def to_openai(self) -> dict[str, Any]:
        """The object that OpenAI's API streams."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass
class MessageDelta:
    """What a piece of text adds to a message.

    Attributes:
        reasoning_content, content: more text of either.
        tool_calls: changes of calls, in order.
        abandoned: indices of started calls that turned out malformed; their text comes back in `content`.
    """

    reasoning_content: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)

    def to_openai(self) -> dict[str, Any]:
        """The delta that OpenAI's API streams: only fields with something in them."""
        calls = [call.to_openai() for call in self.tool_calls]
        fields = {"reasoning_content": self.reasoning_content, "content": self.content, "tool_calls": calls}
        return {key: value for key, value in fields.items() if value}


@dataclass
class AssistantMessage:
    """A parsed message."""

    reasoning_content: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def to_openai(self) -> dict[str, Any]:
        """The message as it may be put back into a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if not self.tool_calls:
            message["content"] = self.content
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class MessageStream:
    """Incremental parser: `feed` text as it comes, then `flush` once.

    Args:
        prefilled: the prompt ended with <think>; see `opens_reasoning`.
        stream_arguments: see ToolCallStream; without it no call is ever abandoned.
    """

    def __init__(self, *, prefilled: bool = False, stream_arguments: bool = True) -> None:
        self._reasoning = ReasoningStream(prefilled=prefilled)
        self._calls = ToolCallStream(stream_arguments=stream_arguments)
        self._has_call = False

    @property
    def finish_reason(self) -> str:
        """OpenAI's reason for a message that ended by itself: tool_calls or stop."""
        return "tool_calls" if self._has_call else "stop"

    def feed(self, text: str) -> MessageDelta:
        """What this text adds."""
        reasoned = self._reasoning.feed(text)
        return self._delta(reasoned, self._calls.feed(reasoned.content))

    def flush(self) -> MessageDelta:
        """What was held back, at the end of the text."""
        reasoned = self._reasoning.flush()
        return self._delta(reasoned, self._calls.feed(reasoned.content) + self._calls.flush())

    def _delta(self, reasoned: ReasonedText, events: Sequence[Event]) -> MessageDelta:
        delta = MessageDelta(reasoning_content=reasoned.reasoning)
        for event in events:
            if isinstance(event, Content):
                delta.content += event.text
            elif isinstance(event, ToolCallStart):
                delta.tool_calls.append(ToolCallDelta(event.index, event.id, event.name))
            elif isinstance(event, ToolCallArguments):
                delta.tool_calls.append(ToolCallDelta(event.index, arguments=event.text))
            elif isinstance(event, ToolCallAbandoned):
                delta.abandoned.append(event.index)
            elif isinstance(event, ToolCallEnd):
                self._has_call = True
        return delta


def parse_message(text: str, *, prefilled: bool = False) -> AssistantMessage:
    """Parse a whole assistant message; see MessageStream."""
    reasoning = ReasoningStream(prefilled=prefilled)
    first, last = reasoning.feed(text), reasoning.flush()
    calls = ToolCallStream()
    parsed = collect(calls.feed(first.content + last.content) + calls.flush())
    return AssistantMessage(first.reasoning + last.reasoning, parsed.content, parsed.tool_calls)


def opens_reasoning(prompt: Sequence[Segment]) -> bool:
    """Whether a rendered prompt leaves <think> open, so that the model's text begins inside its reasoning."""
    return bool(prompt) and prompt[-1].markup and prompt[-1].text.endswith(THINK)
