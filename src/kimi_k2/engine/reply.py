"""A sequence's tokens as an assistant's message, while they come: text, stop strings, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from kimi_k2.engine.sampler import TokenLogprobs
from kimi_k2.tokenization.deltas import AssistantMessage, Content, Delta, collect
from kimi_k2.tokenization.message import FinishReason, MessageStream
from kimi_k2.tokenization.tokenizer import KimiTokenizer


class Reply:
    """Incremental: `feed` each token, `finish` once when no more come.

    Args:
        tokenizer: of the checkpoint.
        end_ids: tokens that end a turn; they are no text.
        stop: strings that end it, none empty; neither they nor what follows is part of the message.
        tools: of the request, None for none; see MessageStream.
        prefilled: the prompt left <think> open; see `opens_reasoning`.
        parse: split reasoning and tool calls off; without it everything is content.
        min_tokens: of the reply, before which a stop string ends nothing.

    Attributes:
        text: all that the model wrote, markup included.
        tokens: how many were fed.
        logprobs: each with its log-probabilities, where they were asked for; whoever feeds the reply adds them.
        finish_reason: None while running; then stop, length or tool_calls, as in OpenAI's API.
    """

    def __init__(
        self,
        tokenizer: KimiTokenizer,
        end_ids: Collection[int],
        *,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        prefilled: bool = False,
        parse: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.text, self.tokens = "", 0
        self.logprobs: list[tuple[int, TokenLogprobs]] = []
        self.finish_reason: FinishReason | None = None
        self._decoder = tokenizer.incremental_decoder()
        self._end_ids, self._stop, self._min_tokens = end_ids, tuple(stop), min_tokens
        self._parser = MessageStream(tools=tools or (), prefilled=prefilled, tokenizer=tokenizer) if parse else None
        self._held, self._early = "", 0  # may begin a stop string; how much of it is of the first min_tokens
        self._deltas: list[Delta] = []

    @property
    def message(self) -> AssistantMessage:
        """What was written so far, parsed."""
        return collect(self._deltas, self.finish_reason or "length")

    def feed(self, token: int) -> list[Delta]:
        """What a token adds; nothing after the end."""
        if self.finish_reason is not None:
            return []
        self.tokens += 1
        if token in self._end_ids:
            return self._end("stop")
        return self._take(self._decoder.feed(token), [token])

    def finish(self) -> list[Delta]:
        """What was held back, when the limit of tokens ended the sequence."""
        return [] if self.finish_reason is not None else self._end("length")

    def _take(self, text: str, ids: Sequence[int] = ()) -> list[Delta]:
        """Pass on what can no longer be part of a stop string; end at one."""
        self._held += text
        if self.tokens <= self._min_tokens:
            self._early = len(self._held)
        # One that is whole within the early tokens ends nothing.
        starts = [(stop, max(0, self._early - len(stop) + 1)) for stop in self._stop]
        stops = [found for stop, start in starts if (found := self._held.find(stop, start)) >= 0]
        if stops:
            return self._pass_on(min(stops), ids) + self._close("stop")
        return self._pass_on(self._ready(), ids)

    def _ready(self) -> int:
        """How much of the held text begins no stop string, whatever follows."""
        length = len(self._held)
        starts = range(max(0, length - max(map(len, self._stop), default=1) + 1), length)
        return next((at for at in starts if any(stop.startswith(self._held[at:]) for stop in self._stop)), length)

    def _pass_on(self, length: int, ids: Sequence[int] = ()) -> list[Delta]:
        """The deltas of the held text's first `length` characters; the rest may be of the same ids."""
        text, self._held, self._early = self._held[:length], self._held[length:], max(0, self._early - length)
        self.text += text
        plain: list[Delta] = [Content(text)] if text else []
        deltas = plain if self._parser is None else self._parser.feed(text, ids)
        self._deltas += deltas
        return deltas

    def _end(self, reason: Literal["stop", "length"]) -> list[Delta]:
        """The end without a stop string: all that is held is text."""
        deltas = self._take(self._decoder.flush())
        if self.finish_reason is not None:
            return deltas
        return deltas + self._pass_on(len(self._held)) + self._close(reason)

    def _close(self, reason: Literal["stop", "length"]) -> list[Delta]:
        self.finish_reason = reason
        if self._parser is None:
            return []
        last = self._parser.finish(reason)
        self.finish_reason = self._parser.finish_reason
        self._deltas += last
        return last
