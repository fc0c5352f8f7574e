"""Kimi-K2 for NxD Inference, and what the model needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import KimiK2InferenceConfig, KimiK2NeuronConfig
    from .modeling_kimi_k2 import NeuronKimiK2ForCausalLM

__all__ = ["KimiK2InferenceConfig", "KimiK2NeuronConfig", "NeuronKimiK2ForCausalLM"]
_HOMES = {
    "KimiK2InferenceConfig": "config",
    "KimiK2NeuronConfig": "config",
    "NeuronKimiK2ForCausalLM": "modeling_kimi_k2",
}


def __getattr__(name: str) -> Any:
    # On demand, so that the modules that need no NxD can be imported where there is none.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
