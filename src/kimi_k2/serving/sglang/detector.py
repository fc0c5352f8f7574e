"""`--tool-call-parser kimi_k2_stream`: the parser of `tokenization.message` behind SGLang's interface.

SGLang hands text alone, so every spelling of a marker counts as one; and it makes ids of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.kimik2_detector import KimiK2Detector

from kimi_k2.tokenization.deltas import Delta, openai_delta
from kimi_k2.tokenization.lexer import SPELLINGS
from kimi_k2.tokenization.message import MessageStream


class KimiK2StreamDetector(KimiK2Detector):  # type: ignore[misc]  # SGLang has no types for mypy here
    """One reply's tool calls; the grammar for forced calls is that of SGLang's own parser."""

    def __init__(self) -> None:
        super().__init__()
        self._stream: MessageStream | None = None

    def has_tool_call(self, text: str) -> bool:
        """Whether the text has any marker: without one SGLang shows it as it is."""
        return any(spelling in text for spelling in SPELLINGS)

    def detect_and_parse(self, text: str, tools: Sequence[Any]) -> Any:
        """Parse a whole reply: its calls, each in one item, and its content."""
        stream = _stream(tools)
        return _result([*stream.feed(text), *stream.finish()])

    def parse_streaming_increment(self, new_text: str, tools: Sequence[Any]) -> Any:
        """What this text adds."""
        if self._stream is None:
            self._stream = _stream(tools)
        return self._kept(self._stream.feed(new_text))

    def finish(self, tools: Sequence[Any]) -> Any:
        """What was held back, at the end of the reply."""
        return StreamingParseResult() if self._stream is None else self._kept(self._stream.finish())

    def _kept(self, deltas: Iterable[Delta]) -> Any:
        """The result; and a record that leaves nothing for SGLang's server to add at the end."""
        result = _result(deltas)
        for item in result.calls:
            if item.name is not None:
                self.current_tool_id = item.tool_index
                self.prev_tool_call_arr.append({"name": item.name, "arguments": ""})
                self.streamed_args_for_tool.append("")
            self.streamed_args_for_tool[item.tool_index] += item.parameters
        return result


def _stream(tools: Sequence[Any]) -> MessageStream:
    return MessageStream(tools=[tool.model_dump() for tool in tools], after_reasoning=True)


def _result(deltas: Iterable[Delta]) -> Any:
    fields = openai_delta(deltas)
    calls = [
        ToolCallItem(
            tool_index=call["index"], name=call["function"].get("name"), parameters=call["function"]["arguments"]
        )
        for call in fields.get("tool_calls", [])
    ]
    return StreamingParseResult(normal_text=fields.get("content", ""), calls=calls)
