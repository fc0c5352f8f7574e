"""What both parsers take of vLLM: message classes, which have moved between its versions, and its tokenizer."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kimi_k2.tokenization.aligned import AlignedLexer
from kimi_k2.tokenization.lexer import Marker

# In the order in which they are looked for: 0.32 and newer; 0.24.
_PLACES = ("vllm.entrypoints.generate.base.protocol", "vllm.entrypoints.openai.engine.protocol")


def _find(name: str) -> Any:
    for place in _PLACES:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"vLLM has no {name} in {' or '.join(_PLACES)}")


DeltaMessage = _find("DeltaMessage")
DeltaToolCall = _find("DeltaToolCall")
DeltaFunctionCall = _find("DeltaFunctionCall")
ExtractedToolCallInformation = _find("ExtractedToolCallInformation")
FunctionCall = _find("FunctionCall")
ToolCall = _find("ToolCall")


def marker_ids(vocabulary: Mapping[str, int]) -> dict[int, Marker]:
    """The marker tokens that a vocabulary has; members of the family without reasoning lack two."""
    return {vocabulary[marker.value]: marker for marker in Marker if marker.value in vocabulary}


def aligned_lexer(tokenizer: Any, vocabulary: Mapping[str, int]) -> AlignedLexer:
    """A lexer for one reply."""

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text

    return AlignedLexer(marker_ids(vocabulary), decode)
