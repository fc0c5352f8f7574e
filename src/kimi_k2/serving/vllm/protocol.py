"""vLLM's message classes under one name each: they have moved between its versions."""

from __future__ import annotations

import importlib
from typing import Any

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
