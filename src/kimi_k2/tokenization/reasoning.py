"""Parser of the <think>...</think> reasoning of K2-Thinking, K2.5 and K2.6, for whole texts and streams cut anywhere.

Reasoning stands at the beginning only: it opens with <think> (or was opened by the prompt) and ends with </think>, or
where a tool call begins, since the model sometimes calls a tool without closing. Tags out of place are dropped, the
text around them stays what it is; in a tool call's arguments they are text. Reasoning that never ends (the token limit
came first) is still reasoning; `closed` tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization.deltas import Reasoning
from kimi_k2.tokenization.lexer import Lexeme, Marker, TextLexer


class _State(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()


class ReasoningMachine:
    """Splits lexemes: `push` each, then `finish` once; what is not reasoning passes through.

    Args:
        prefilled: the prompt already ended with <think> (K2.5 and K2.6 with thinking on).
        over: the reasoning has ended before the first lexeme.
    """

    def __init__(self, *, prefilled: bool = False, over: bool = False) -> None:
        self._prefilled = prefilled
        self._state = _State.CONTENT if over else _State.START
        self._leading: list[str] = []  # white space that may belong to an opening tag
        self._in_arguments = False

    @property
    def closed(self) -> bool:
        """Whether reasoning, if any, has ended."""
        return self._state is _State.CONTENT or (self._state is _State.START and not self._prefilled)

    def push(self, lexeme: Lexeme) -> Iterator[Reasoning | Lexeme]:
        """Reasoning, or what comes after it."""
        if self._state is _State.START:
            if isinstance(lexeme, str) and lexeme.isspace():
                self._leading.append(lexeme)
                return
            if lexeme is Marker.THINK:
                self._leading, self._state = [], _State.REASONING
                return
            yield from self._leave_start()
        if self._state is _State.REASONING:
            if isinstance(lexeme, str):
                yield Reasoning(lexeme)
                return
            if lexeme is Marker.THINK_END:
                self._state = _State.CONTENT
                return
            if lexeme not in (Marker.SECTION_BEGIN, Marker.CALL_BEGIN):
                return
            self._state = _State.CONTENT
        if isinstance(lexeme, Marker):
            if lexeme in (Marker.THINK, Marker.THINK_END):
                if not self._in_arguments:
                    return
            else:
                self._in_arguments = lexeme is Marker.ARGUMENT_BEGIN
        yield lexeme

    def finish(self) -> Iterator[Reasoning | Lexeme]:
        """What was held back, at the end of the text."""
        if self._state is _State.START:
            yield from self._leave_start()

    def _leave_start(self) -> Iterator[Reasoning | Lexeme]:
        leading, self._leading = "".join(self._leading), []
        self._state = _State.REASONING if self._prefilled else _State.CONTENT
        if leading:
            yield Reasoning(leading) if self._prefilled else leading


@dataclass
class ReasonedText:
    """A message, or a piece of one, split in two.

    Attributes:
        reasoning: text between the tags.
        content: all the rest, tool calls and their markers included.
        closed: whether the reasoning, if any, has ended.
    """

    reasoning: str
    content: str
    closed: bool


class ReasoningStream:
    """Incremental parser: `feed` text as it comes; for engines that parse tool calls by themselves.

    TokenizerError for text after the last.

    Args:
        prefilled: the prompt already ended with <think> (K2.5 and K2.6 with thinking on). Pass True as well to take a
            text without an opening tag for reasoning up to </think>, as vLLM does.
    """

    def __init__(self, *, prefilled: bool = False) -> None:
        self._lexer = TextLexer()
        self._machine, self._over = ReasoningMachine(prefilled=prefilled), False

    @property
    def closed(self) -> bool:
        """Whether reasoning, if any, has ended."""
        return self._machine.closed

    def feed(self, text: str, *, last: bool = False) -> ReasonedText:
        """What this text adds to reasoning and content; with `last` what was held back, too."""
        if self._over and text:
            raise TokenizerError("the message is finished: another one needs a stream of its own")
        self._over = self._over or last
        lexemes = [*self._lexer.feed(text), *(self._lexer.flush() if last else ())]
        pieces = [piece for lexeme in lexemes for piece in self._machine.push(lexeme)]
        if last:
            pieces += self._machine.finish()
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        content = "".join(
            piece if isinstance(piece, str) else piece.value for piece in pieces if not isinstance(piece, Reasoning)
        )
        return ReasonedText(reasoning, content, self.closed)
