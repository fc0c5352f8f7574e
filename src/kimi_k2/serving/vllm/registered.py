"""The classes that vLLM's registry is given: ours, or its own where it lacks a name that ours stand on."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.kimi_k2")


def _classes() -> tuple[Any, Any]:
    try:
        from kimi_k2.serving.vllm import model
    except Exception as error:  # whatever vLLM has become, its own models must go on
        logger.warning("kimi-k2: all operations are vLLM's, since it has changed: %s", error)
        from kimi_k2.serving.vllm.adapter import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

        return DeepseekV3ForCausalLM, DeepseekV2ForCausalLM
    return model.KimiK2ForVllm, model.KimiK25TextForVllm


KimiK2ForVllm, KimiK25TextForVllm = _classes()
