"""Kimi-K2 on NxD Inference."""

import importlib

_MODULES = {
    "ConfigError": "quantization",
    "KimiK2InferenceConfig": "configuration_kimi_k2",
    "KimiK2NeuronConfig": "configuration_kimi_k2",
    "NeuronKimiK2ForCausalLM": "modeling_kimi_k2",
    "NeuronKimiK2Model": "modeling_kimi_k2",
    "load_kimi_config": "configuration_kimi_k2",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    # On demand: `checkpoint` and `quantization` need no NxDI, and convert where there is none.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
