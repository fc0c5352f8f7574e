"""Our model as the target of vLLM's drafts: what a head may share with its target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.serving.vllm.adapter import ParallelLMHead, VocabParallelEmbedding


class Shared:
    """What vLLM looks for in a target's `model`.

    Args:
        plain: the rank's part, whose tensors vLLM's layers here have.
        config: of the model, as transformers has it.
    """

    def __init__(self, plain: KimiK2ForCausalLM, config: Any) -> None:
        self.layers = plain.model.layers
        self.embed_tokens = _over(VocabParallelEmbedding, plain.model.embed_tokens.weight, config)
        self.lm_head = _over(ParallelLMHead, plain.lm_head.weight, config)


def _over(kind: type[Any], weight: Tensor, config: Any) -> Any:
    """vLLM's layer, which its drafts' compiler knows, with a weight of ours."""
    with torch.device("meta"):
        layer = kind(config.vocab_size, config.hidden_size, params_dtype=weight.dtype)
        layer.quant_method.process_weights_after_loading(layer)  # here without a copy of its own
    if layer.weight.shape != weight.shape:
        raise ValueError(f"vLLM's {kind.__name__} of a rank is {list(layer.weight.shape)}, ours {list(weight.shape)}")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
