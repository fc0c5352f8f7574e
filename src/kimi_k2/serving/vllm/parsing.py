"""What both parsers have in common: vLLM's parser engine, its tokenizer, and its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kimi_k2.serving.vllm.adapter import (
    DeltaMessage,
    EventType,
    ParserEngine,
    ParserEngineConfig,
    ParserState,
    Transition,
)
from kimi_k2.tokenization.aligned import AlignedLexer
from kimi_k2.tokenization.lexer import Marker, marker_ids
from kimi_k2.tokenization.special_tokens import IM_MIDDLE


class ReasoningEnds(ParserEngine):  # type: ignore[misc]  # vLLM has no types for mypy here
    """vLLM's parser engine, told where a reply's reasoning ends; vLLM asks it where a grammar begins.

    Text is read by our own lexer, in the adapters that hold this.

    Attributes:
        thinks: whether the vocabulary has the tags of reasoning, and the request has not switched it off.
    """

    def __init__(self, tokenizer: Any, tools: Any = None, **keywords: Any) -> None:
        options = keywords.get("chat_template_kwargs") or {}
        asked = [options[name] for name in ("thinking", "enable_thinking") if options.get(name) is not None]
        markers = set(marker_ids(tokenizer.get_vocab()).values())
        self.thinks = {Marker.THINK, Marker.THINK_END} <= markers and (not asked or any(asked))
        super().__init__(tokenizer, tools, parser_engine_config=_config(self.thinks), **keywords)


def _config(thinks: bool) -> Any:
    """What ends reasoning: its tag, or a section of calls, whose marker a grammar takes as its own first token."""
    if not thinks:
        return ParserEngineConfig(name="kimi_k2_stream")
    ends = {"THINK_END": ParserState.CONTENT, "SECTION_BEGIN": ParserState.TOOL_PREAMBLE}
    said = {
        "name": "kimi_k2_stream",
        "initial_state": ParserState.REASONING,
        "wait_for_reasoning": True,
        "turn_boundary_tokens": frozenset({IM_MIDDLE}),
        "terminals": {name: Marker[name].value for name in ends},
        "transitions": {
            (ParserState.REASONING, name): Transition(state, (EventType.REASONING_END,)) for name, state in ends.items()
        },
    }
    said["terminals"]["THINK_START"] = Marker.THINK.value
    said["transitions"][ParserState.REASONING, "THINK_START"] = Transition(ParserState.REASONING)
    said["token_id_terminals"] = said["terminals"]
    known = {field.name for field in fields(ParserEngineConfig)}
    return ParserEngineConfig(**{name: value for name, value in said.items() if name in known})


def delta_message(**fields: Any) -> Any:
    """What is streamed of those fields that say something; None if none does."""
    said = {name: value for name, value in fields.items() if value}
    return DeltaMessage(**said) if said else None


def aligned_lexer(tokenizer: Any, vocabulary: Mapping[str, int]) -> AlignedLexer:
    """A lexer for one reply."""

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text

    return AlignedLexer(marker_ids(vocabulary), decode)
