"""Kimi-K2 on NxD Inference."""

from .configuration_kimi_k2 import KimiK2InferenceConfig, KimiK2NeuronConfig, load_kimi_config
from .modeling_kimi_k2 import NeuronKimiK2ForCausalLM, NeuronKimiK2Model
from .quantization import ConfigError

__all__ = [
    "ConfigError",
    "KimiK2InferenceConfig",
    "KimiK2NeuronConfig",
    "NeuronKimiK2ForCausalLM",
    "NeuronKimiK2Model",
    "load_kimi_config",
]
