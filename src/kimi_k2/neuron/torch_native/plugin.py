"""Registration with vLLM under the torch-native line. vLLM calls it in every process that it starts, at times twice."""

from __future__ import annotations

import importlib
import importlib.util
import logging

from kimi_k2.neuron.torch_native.settings import FORMATS

logger = logging.getLogger("vllm.kimi_k2")

PLATFORM = "vllm_neuron.vllm.platform"
TARGET = "kimi_k2.neuron.torch_native.model:KimiK2ForVllmNeuron"
CONVERTED = "_cpu_dequant_quantizations"  # of the platform: formats of weights that a model's loader converts
# What config.json names: K2's text model, and K2.5's, of which the text is served.
ARCHITECTURES = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")


def installed() -> bool:
    """Whether vllm-neuron is of the torch-native line: the older one has its platform elsewhere."""
    try:
        return importlib.util.find_spec(PLATFORM) is not None
    except ImportError:  # no vllm_neuron at all, or one without this package
        return False


def register() -> None:
    """Offer the model, and have the platform admit the checkpoint's FP8 and INT4.

    The line has no DeepSeek model of its own, so the architecture's name is free; `KimiK2ForVllmNeuron.from_configs`
    refuses other models of that name by the field that differs.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, TARGET)
    platform = importlib.import_module(PLATFORM).NeuronPlatform
    admitted = getattr(platform, "supported_quantization", None)
    if isinstance(admitted, list) and "fp8" not in admitted:
        admitted.append("fp8")
    # Weights of compressed-tensors pass where neuron_config.quantization names one of these.
    converted = getattr(platform, CONVERTED, None)
    if isinstance(converted, frozenset):
        setattr(platform, CONVERTED, converted | set(FORMATS))
    else:
        logger.warning("kimi-k2: this vllm-neuron admits no INT4 checkpoint: its platform has changed")
