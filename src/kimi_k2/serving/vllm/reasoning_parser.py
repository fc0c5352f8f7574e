"""`--reasoning-parser kimi_k2_stream`: the parser of `tokenization.reasoning` behind vLLM's interface."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kimi_k2.serving.vllm.adapter import ParserEngineReasoningAdapter
from kimi_k2.serving.vllm.parsing import ReasoningEnds, aligned_lexer, delta_message
from kimi_k2.tokenization.aligned import AlignedLexer
from kimi_k2.tokenization.deltas import Reasoning
from kimi_k2.tokenization.lexer import Lexeme, Marker, marker_ids
from kimi_k2.tokenization.reasoning import ReasoningMachine
from kimi_k2.tokenization.special_tokens import IM_MIDDLE, THINK, THINK_END

# Where reasoning ends: its tag, or a call that the model makes without closing it.
_TAIL = 4  # ids at a prompt's end among which an open <think> stands: a template may write a line break after it
_GRAMMAR_BEGINS = (Marker.THINK_END, Marker.SECTION_BEGIN)
_ENDS = (*_GRAMMAR_BEGINS, Marker.CALL_BEGIN)  # in the text; no grammar knows a call outside its section


class KimiK2StreamReasoningParser(ParserEngineReasoningAdapter):  # type: ignore[misc]  # vLLM has no types for mypy here
    """One reply's reasoning; vLLM makes one for each choice of a request.

    What follows the reasoning goes on as content, markers included, for a tool parser to read. Where a grammar begins
    is vLLM's to find (`parsing.ReasoningEnds`).
    """

    _parser_engine_cls = ReasoningEnds

    def __init__(self, tokenizer: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(tokenizer, *arguments, **keywords)
        self._markers = marker_ids(self.vocab)
        self._thinks = self._parser_engine.thinks
        self._turn_begin = self.vocab.get(IM_MIDDLE)
        self._lexer = aligned_lexer(tokenizer, self.vocab)
        self._machine: ReasoningMachine | None = None
        self._prefilled: bool | None = None  # None until the prompt is known
        self._template_options: dict[str, Any] = keywords.get("chat_template_kwargs") or {}
        self._has_ended = False
        self._handed_over: list[int] | None = None

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last turn in these ids is past its reasoning; true without reasoning."""
        if not self._thinks:
            return True
        for token in reversed(input_ids):
            if token == self._turn_begin or self._markers.get(token) is Marker.THINK:
                return False
            if self._markers.get(token) in _GRAMMAR_BEGINS:
                return True
        return False

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether reasoning ends within `delta_ids`, the last of `input_ids`."""
        return not self._thinks or any(self._markers.get(token) in _GRAMMAR_BEGINS for token in delta_ids)

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Whether the text so far is past its reasoning."""
        return self._has_ended

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Learn whether the prompt opened the reasoning."""
        last = [self._markers[token] for token in prompt_token_ids[-_TAIL:] if token in self._markers]
        self._prefilled = last[-1:] == [Marker.THINK]

    adjust_initial_state_from_prompt = set_prompt_token_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Ids after the reasoning. Right after reasoning has ended in a stream: those whose text is not yet read."""
        if self._handed_over is not None:
            ids, self._handed_over = self._handed_over, None
            return ids
        for at, token in enumerate(input_ids):
            marker = self._markers.get(token)
            if marker in _ENDS:
                return list(input_ids[at + (marker is Marker.THINK_END) :])
        return []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of a reply's tokens are reasoning, its tags not counted."""
        count, is_open = 0, bool(self._prefilled)
        for token in token_ids:
            marker = self._markers.get(token)
            if marker is Marker.THINK:
                is_open = True
            elif marker in _ENDS:
                return count
            elif is_open:
                count += 1
        return count

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Split a whole reply into its reasoning and the rest."""
        if not self._thinks:
            return None, model_output
        prefilled = self._prefilled
        if prefilled is None:
            opened = model_output.lstrip().startswith(THINK)
            prefilled = not opened and (THINK_END in model_output or self._template_opens(request))
        lexer, machine = aligned_lexer(self.model_tokenizer, self.vocab), ReasoningMachine(prefilled=prefilled)
        lexer.feed(model_output, ())
        reasoning, after = _read(lexer, machine)
        if after is not None:  # as in a stream, the rest is the tool parser's, as it is
            return reasoning or None, "".join(map(_text, after)) + lexer.rest()[0] or None
        more, content = _finish(lexer, machine)
        return reasoning + more or None, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> Any:
        """What these tokens add: reasoning and, once it has ended, all the text after it as content."""
        if self._machine is None:
            self._machine = ReasoningMachine(prefilled=bool(self._prefilled))
        self._lexer.feed(delta_text, delta_token_ids)
        reasoning, after = _read(self._lexer, self._machine)
        return delta_message(reasoning=reasoning, content="" if after is None else self._hand_over(after))

    def finish_streaming(self) -> Any:
        """What was held back, at the end of a reply that never left its reasoning; None if nothing."""
        if self._machine is None or self._has_ended:
            return None
        machine, self._machine = self._machine, None
        reasoning, content = _finish(self._lexer, machine)
        return delta_message(reasoning=reasoning, content=content)

    def _hand_over(self, after: Sequence[Lexeme]) -> str:
        """The text that follows the reasoning, from `after` on; its ids wait for `extract_content_ids`."""
        self._has_ended = True
        text, ids = self._lexer.rest()
        if self._lexer.has_ids:
            # A marker's id went with it; ids of text since the last marker are still among `ids`.
            tokens = {marker: token for token, marker in self._markers.items()}
            ids = [tokens[piece] for piece in after if isinstance(piece, Marker) and piece in tokens] + ids
        self._handed_over = ids
        return "".join(map(_text, after)) + text

    def _template_opens(self, request: Any) -> bool:
        """Whether the chat template leaves <think> open, for versions of vLLM that do not tell the prompt."""
        options = {**self._template_options, **(getattr(request, "chat_template_kwargs", None) or {})}
        options["chat_template"] = getattr(request, "chat_template", None) or options.get("chat_template")
        message = [{"role": "user", "content": "."}]
        try:
            prompt = self.model_tokenizer.apply_chat_template(
                message, **{**options, "tokenize": False, "add_generation_prompt": True}
            )
        except Exception:  # a tokenizer without a template, or one of another kind: nobody knows then
            return False
        return isinstance(prompt, str) and prompt.rstrip().endswith(THINK)


def _read(lexer: AlignedLexer, machine: ReasoningMachine) -> tuple[str, list[Lexeme] | None]:
    """Reasoning among the lexemes that are complete, and the first that comes after it; None until it has ended."""
    reasoning: list[str] = []
    for lexeme in lexer.lexemes():
        after: list[Lexeme] = []
        for piece in machine.push(lexeme):
            if isinstance(piece, Reasoning):
                reasoning.append(piece.text)
            else:
                after.append(piece)
        if after or (lexeme is Marker.THINK_END and machine.closed):
            return "".join(reasoning), after
    return "".join(reasoning), None


def _finish(lexer: AlignedLexer, machine: ReasoningMachine) -> tuple[str, str]:
    """Reasoning and content that were held back, at the end of a reply that never left its reasoning."""
    pieces = [piece for lexeme in lexer.flush() for piece in machine.push(lexeme)]
    pieces += machine.finish()
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return reasoning, "".join(_text(piece) for piece in pieces if not isinstance(piece, Reasoning))


def _text(piece: Lexeme) -> str:
    return piece.value if isinstance(piece, Marker) else piece
