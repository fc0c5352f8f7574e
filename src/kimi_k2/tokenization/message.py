"""Parser of a whole assistant message, reasoning, content and tool calls at once: what servers and chat programs use.

    stream = MessageStream(tokenizer=tokenizer, tools=tools, prefilled=opens_reasoning(prompt))
    decoder = tokenizer.incremental_decoder()
    for token in generated:
        for delta in stream.feed(decoder.feed(token), [token]):
            match delta:
                case Reasoning(text) | Content(text): print(text, end="")
                case ToolCallStart(index, id, name): ...
                case ToolCallArguments(index, text): ...
                case ToolCallEnd(index, complete): ...
    last = stream.finish("length" if len(generated) == limit else "stop")
    stream.finish_reason  # stop, tool_calls or length

Without ids every spelling of a marker counts as one. The deltas put together are the same however the stream is cut,
and the same as `parse_message` of the whole text. Time and memory are linear in the stream. `collect(deltas)` is the
whole message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization.aligned import AlignedLexer
from kimi_k2.tokenization.deltas import AssistantMessage, Delta, Reasoning, collect, merged
from kimi_k2.tokenization.erasing import MarkerEraser
from kimi_k2.tokenization.lexer import Lexeme, marker_ids
from kimi_k2.tokenization.reasoning import ReasoningMachine
from kimi_k2.tokenization.special_tokens import THINK
from kimi_k2.tokenization.template import Segment
from kimi_k2.tokenization.tool_calls import ToolCallMachine

if TYPE_CHECKING:
    from kimi_k2.tokenization.tokenizer import KimiTokenizer

FinishReason = Literal["stop", "length", "tool_calls"]


class MessageStream:
    """Incremental parser: feed text or tokens as they come, then `finish`; TokenizerError for anything after it.

    Attributes:
        finish_reason: OpenAI's reason for the end of the message; None before `finish`.

    Args:
        tools: OpenAI-style definitions of the request's tools: no call is for another; None where nobody knows them.
        prefilled: the prompt ended with <think>; see `opens_reasoning`.
        after_reasoning: another parser has taken the reasoning; the text is what follows it.
        tokenizer: of the ids that `feed` is given; None where it is given text alone.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prefilled: bool = False,
        after_reasoning: bool = False,
        tokenizer: KimiTokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        special, decode = ({}, str) if tokenizer is None else (tokenizer.special_tokens, tokenizer.decode)
        self._lexer = AlignedLexer(marker_ids(special), decode)
        self._reasoning = ReasoningMachine(prefilled=prefilled, over=after_reasoning)
        self._calls = ToolCallMachine(tools)
        self._eraser = MarkerEraser()
        self.finish_reason: FinishReason | None = None

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Delta]:
        """What this text adds, and the ids of it; without any a marker spelled out in it counts as the marker.

        Args:
            text: may lag behind the ids, where a character is cut.
            ids: one that ends a turn would be text.
        """
        self._unfinished()
        if ids and self._tokenizer is None:
            raise TokenizerError("ids need a MessageStream made with a tokenizer")
        self._lexer.feed(text, ids)
        deltas = self._push(self._lexer.lexemes())
        return merged(deltas if self._lexer.has_ids else self._eraser.push(deltas))

    def finish(self, reason: Literal["stop", "length"] | None = None) -> list[Delta]:
        """What was held back, at the end of the message.

        Args:
            reason: `length` if the token limit ended the message, `stop` if the model did; None if nobody knows: then
                a message that ends inside a call or inside its reasoning counts as cut off.
        """
        self._unfinished()
        if reason not in (None, "stop", "length"):
            raise TokenizerError(f"reason: expected stop, length or None, got {reason!r}")
        last = [*self._push(self._lexer.flush()), *self._through(self._reasoning.finish())]
        cut = reason == "length" or (reason is None and (self._calls.in_call or not self._reasoning.closed))
        last += self._calls.finish()
        self.finish_reason = "length" if cut else "tool_calls" if self._calls.started else "stop"
        return merged(last if self._lexer.has_ids else [*self._eraser.push(last), *self._eraser.finish()])

    def _unfinished(self) -> None:
        if self.finish_reason is not None:
            raise TokenizerError("the message is finished: another one needs a stream of its own")

    def _push(self, lexemes: Iterable[Lexeme]) -> Iterator[Delta]:
        for lexeme in lexemes:
            yield from self._through(self._reasoning.push(lexeme))

    def _through(self, pieces: Iterable[Reasoning | Lexeme]) -> Iterator[Delta]:
        for piece in pieces:
            if isinstance(piece, Reasoning):
                yield piece
            else:
                yield from self._calls.push(piece)


def parse_message(
    text: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prefilled: bool = False,
    reason: Literal["stop", "length"] | None = None,
) -> AssistantMessage:
    """Parse a whole assistant message; see MessageStream."""
    stream = MessageStream(tools=tools, prefilled=prefilled)
    deltas = stream.feed(text) + stream.finish(reason)
    return collect(deltas, stream.finish_reason or "stop")


def opens_reasoning(prompt: Sequence[Segment]) -> bool:
    """Whether a rendered prompt leaves <think> open, so that the model's text begins inside its reasoning."""
    return bool(prompt) and prompt[-1].markup and prompt[-1].text.endswith(THINK)
