"""A sequence's tokens as an assistant's message, while they come: text, stop strings, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kimi_k2.errors import GenerationError
from kimi_k2.tokenization.message import AssistantMessage, MessageDelta, MessageStream, parse_message
from kimi_k2.tokenization.streaming import find_marker, safe_length
from kimi_k2.tokenization.tokenizer import KimiTokenizer


class Reply:
    """Incremental: `feed` each token, `finish` once when no more come.

    Args:
        tokenizer: of the checkpoint.
        end_ids: tokens that end a turn; they are no text.
        stop: strings that end it; neither they nor what follows is part of the message.
        prefilled: the prompt left <think> open; see `opens_reasoning`.
        parse: split reasoning and tool calls off; without it everything is content.

    Attributes:
        text: all that the model wrote, markup included.
        tokens: how many were fed.
        finish_reason: None while running; then stop, length or tool_calls, as in OpenAI's API.

    Raises:
        GenerationError: a stop string is empty.
    """

    def __init__(
        self,
        tokenizer: KimiTokenizer,
        end_ids: Collection[int],
        *,
        stop: Sequence[str] = (),
        prefilled: bool = False,
        parse: bool = True,
    ) -> None:
        if not all(stop):
            raise GenerationError("stop: expected strings of at least one character")
        self.text, self.tokens = "", 0
        self.finish_reason: str | None = None
        self._decoder = tokenizer.incremental_decoder()
        self._end_ids, self._stop = end_ids, tuple(stop)
        self._prefilled = prefilled
        self._parser = MessageStream(prefilled=prefilled) if parse else None
        self._held = ""  # may be the beginning of a stop string

    @property
    def message(self) -> AssistantMessage:
        """What was written so far, parsed."""
        if self._parser is None:
            return AssistantMessage(content=self.text)
        return parse_message(self.text, prefilled=self._prefilled)

    def feed(self, token: int) -> MessageDelta:
        """What a token adds; nothing after the end."""
        if self.finish_reason is not None:
            return MessageDelta()
        self.tokens += 1
        if token in self._end_ids:
            return self._end("stop", self._held + self._decoder.flush())
        return self._take(self._decoder.feed(token))

    def finish(self) -> MessageDelta:
        """What was held back, when the limit of tokens ended the sequence."""
        if self.finish_reason is not None:
            return MessageDelta()
        delta = self._take(self._decoder.flush())
        if self.finish_reason is not None:
            return delta
        last = self._end("length", self._held)
        return _joined(delta, last)

    def _take(self, piece: str) -> MessageDelta:
        if not self._stop:
            return self._parsed(piece)
        self._held += piece
        found = find_marker(self._held, self._stop)
        if found is not None:
            return self._end("stop", self._held[: found[0]])
        ready = safe_length(self._held, self._stop)
        piece, self._held = self._held[:ready], self._held[ready:]
        return self._parsed(piece)

    def _parsed(self, piece: str) -> MessageDelta:
        self.text += piece
        return MessageDelta(content=piece) if self._parser is None else self._parser.feed(piece)

    def _end(self, reason: str, piece: str) -> MessageDelta:
        self._held = ""
        delta = self._parsed(piece)
        self.finish_reason = reason
        if self._parser is None:
            return delta
        last = self._parser.flush()
        if reason == "stop":
            self.finish_reason = self._parser.finish_reason
        return _joined(delta, last)


def _joined(first: MessageDelta, second: MessageDelta) -> MessageDelta:
    return MessageDelta(
        first.reasoning_content + second.reasoning_content,
        first.content + second.content,
        [*first.tool_calls, *second.tool_calls],
        [*first.abandoned, *second.abandoned],
    )
