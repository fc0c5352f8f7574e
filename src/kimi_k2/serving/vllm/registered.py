"""The classes that vLLM's registry is given: ours, or its own where it lacks a name that ours stand on."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.kimi_k2")


try:
    from kimi_k2.serving.vllm.model import KimiK2ForVllm, KimiK25TextForVllm
except Exception as error:  # whatever vLLM has become, its own models must go on
    logger.warning("kimi-k2: all operations are vLLM's, since it has changed: %s", error)
    from kimi_k2.serving.vllm.adapter import DeepseekV2ForCausalLM as KimiK25TextForVllm  # type: ignore[no-redef]
    from kimi_k2.serving.vllm.adapter import DeepseekV3ForCausalLM as KimiK2ForVllm  # type: ignore[no-redef]

__all__ = ["KimiK2ForVllm", "KimiK25TextForVllm"]
