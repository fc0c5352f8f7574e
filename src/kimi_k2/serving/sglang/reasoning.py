"""`--reasoning-parser kimi_k2_stream`: the parser of `tokenization.reasoning` behind SGLang's interface."""

from __future__ import annotations

from typing import Any

from sglang.srt.parser.reasoning_parser import KimiK2Detector, StreamingParseResult

from kimi_k2.tokenization.reasoning import ReasonedText, ReasoningStream
from kimi_k2.tokenization.special_tokens import THINK, THINK_END


class KimiK2StreamReasoningDetector(KimiK2Detector):  # type: ignore[misc]  # SGLang has no types for mypy here
    """One reply's reasoning; what SGLang asks of the format itself is its own detector's."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._stream = ReasoningStream(prefilled=self._in_reasoning)
        self._held = ""  # reasoning, where SGLang wants it whole

    def _detect_and_parse_impl(self, text: str) -> Any:
        opened = text.lstrip().startswith(THINK)
        prefilled = self._in_reasoning or (THINK_END in text and not opened)
        split = ReasoningStream(prefilled=prefilled).feed(text, last=True)
        return StreamingParseResult(normal_text=split.content, reasoning_text=split.reasoning)

    def _parse_streaming_increment_impl(self, new_text: str) -> Any:
        return self._result(self._stream.feed(new_text))

    def _result(self, split: ReasonedText) -> Any:
        self._in_reasoning, self._held = not split.closed, self._held + split.reasoning
        if self._in_reasoning and not self.stream_reasoning:
            return StreamingParseResult(normal_text=split.content)
        reasoning, self._held = self._held, ""
        return StreamingParseResult(normal_text=split.content, reasoning_text=reasoning)

    def finish(self) -> Any:
        """What was held back, at the end of the reply; content where a request wants some in any case."""
        split = self._stream.feed("", last=True)
        reasoning, self._held = self._held + split.reasoning, ""
        if self._force_nonempty_content and not split.closed:
            return StreamingParseResult(normal_text=self._accumulated_reasoning + reasoning + split.content)
        return StreamingParseResult(normal_text=split.content, reasoning_text=reasoning)
