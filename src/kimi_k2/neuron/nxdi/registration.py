"""One call after which vLLM's Neuron plugin and NxDI's demo load the Kimi-K2 family.

Both look a model up in NxDI's `MODEL_TYPES` under the lower-cased first half of `architectures[0]` and read the
checkpoint's configuration with `AutoConfig`. K2's config.json says `DeepseekV3ForCausalLM`; K2.5's says
`KimiK25ForConditionalGeneration`, which the class in `huggingface` reads as the text model's.
"""

from __future__ import annotations

from neuronx_distributed_inference.utils.constants import MODEL_TYPES

from . import huggingface
from .serving import ServedKimiK2ForCausalLM

NAMES = ("deepseekv3", "kimi_k2", "kimik25")


def register() -> None:
    """Add the model and its configuration classes; once in each process, before the engine starts.

    `kimi_k2.neuron.vllm` is the entry point by which vLLM calls this itself.
    """
    huggingface.register()
    for name in NAMES:
        MODEL_TYPES[name] = {"causal-lm": ServedKimiK2ForCausalLM}
