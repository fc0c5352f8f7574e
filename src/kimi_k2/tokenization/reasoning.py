"""Parser of the <think>...</think> reasoning of K2-Thinking, K2.5 and K2.6, for whole texts and streams cut anywhere.

Reasoning stands at the beginning only: it opens with <think> (or was opened by the prompt) and ends with </think>, or
where a tool-call section begins, since the model sometimes calls a tool without closing. Any other tag is content, to
the letter. Reasoning that never ends (the token limit came first) is still reasoning; `closed` tells.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimi_k2.tokenization.special_tokens import SECTION_BEGIN, THINK, THINK_END
from kimi_k2.tokenization.streaming import find_marker, safe_length

_START, _REASONING, _CONTENT = range(3)
_ENDS = (THINK_END, SECTION_BEGIN)


@dataclass
class ReasonedText:
    """A message, or a piece of one, split in two.

    Attributes:
        reasoning: text between the tags.
        content: all the rest.
        closed: whether the reasoning, if any, has ended.
    """

    reasoning: str = ""
    content: str = ""
    closed: bool = True


class ReasoningStream:
    """Incremental parser: `feed` text as it comes, then `flush` once.

    Args:
        prefilled: the prompt already ended with <think> (K2.5 and K2.6 with thinking on).
    """

    def __init__(self, *, prefilled: bool = False) -> None:
        self._prefilled = prefilled
        self._state = _START
        self._leading: list[str] = []  # white space that may belong to an opening tag
        self._buffer = ""

    @property
    def closed(self) -> bool:
        """Whether reasoning, if any, has ended."""
        return self._state == _CONTENT or (self._state == _START and not self._prefilled)

    def feed(self, text: str) -> ReasonedText:
        """What this text adds to reasoning and content."""
        self._buffer += text
        out = ReasonedText()
        if self._state == _START:
            self._leave_start(final=False)
        if self._state == _REASONING:
            found = find_marker(self._buffer, _ENDS)
            if found is None:
                ready = safe_length(self._buffer, _ENDS)
                out.reasoning, self._buffer = self._buffer[:ready], self._buffer[ready:]
            else:
                place, marker = found
                out.reasoning = self._buffer[:place]
                self._buffer = self._buffer[place + (len(marker) if marker == THINK_END else 0) :]
                self._state = _CONTENT
        if self._state == _CONTENT:
            out.content, self._buffer = self._buffer, ""
        out.closed = self.closed
        return out

    def flush(self) -> ReasonedText:
        """What was held back, at the end of the text."""
        if self._state == _START:
            self._leave_start(final=True)
        rest, self._buffer = self._buffer, ""
        is_reasoning = self._state == _REASONING
        return ReasonedText(rest if is_reasoning else "", "" if is_reasoning else rest, self.closed)

    def _leave_start(self, *, final: bool) -> None:
        """Decide whether the text opens with <think>; white space before it belongs to the tag."""
        head = self._buffer.lstrip()
        self._leading.append(self._buffer[: len(self._buffer) - len(head)])
        self._buffer = head
        if head.startswith(THINK):
            self._buffer, self._state = head[len(THINK) :], _REASONING
        elif final or not THINK.startswith(head):
            self._buffer = "".join(self._leading) + head
            self._state = _REASONING if self._prefilled else _CONTENT


def parse_reasoning(text: str, *, prefilled: bool = False) -> ReasonedText:
    """Split a whole assistant message; see ReasoningStream."""
    stream = ReasoningStream(prefilled=prefilled)
    first, last = stream.feed(text), stream.flush()
    return ReasonedText(first.reasoning + last.reasoning, first.content + last.content, last.closed)
