"""vLLM's Neuron plugin resolves a model class by NxDI's MODEL_TYPES; so does NxDI's own demo."""

from __future__ import annotations

import re

import environment
import pytest


def vllm_key(architecture: str) -> tuple[str, str]:
    """The plugin's rule: `XForYZ` is looked up as MODEL_TYPES["x"]["y-z"], conditional generation as causal LM."""
    model, task = architecture.split("For", 1)
    task = "CausalLM" if task == "ConditionalGeneration" else task
    return model.lower(), re.sub("([a-z])([A-Z])", r"\1-\2", task).lower()


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"])
def test_the_registry_resolves_kimi_k2(architecture: str) -> None:
    from neuronx_distributed_inference.utils.constants import MODEL_TYPES

    model, task = vllm_key(architecture)
    before = MODEL_TYPES.get(model)
    assert before is None  # not upstream's: otherwise registering would replace a model
    registration = environment.contrib("registration")
    try:
        registration.register()
        chosen = MODEL_TYPES[model][task]
        assert chosen.__name__ == "NeuronKimiK2ForCausalLM"
        assert chosen.get_config_cls().__name__ == "KimiK2InferenceConfig"
    finally:
        for name in registration.NAMES:
            MODEL_TYPES.pop(name, None)
