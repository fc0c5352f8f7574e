"""Makes vLLM's Neuron plugin and NxDI's demo find NeuronKimiK2ForCausalLM.

Both look a model up in NxDI's `MODEL_TYPES` under the lower-cased first half of `architectures[0]`: K2's config.json
says `DeepseekV3ForCausalLM`, K2.5's `KimiK25ForConditionalGeneration`.
"""

from __future__ import annotations

from neuronx_distributed_inference.utils.constants import MODEL_TYPES

from .modeling_kimi_k2 import NeuronKimiK2ForCausalLM

NAMES = ("deepseekv3", "kimi_k2", "kimik25")


def register() -> None:
    """Add the model to NxDI's table; call it before vLLM starts its engine."""
    for name in NAMES:
        MODEL_TYPES[name] = {"causal-lm": NeuronKimiK2ForCausalLM}
