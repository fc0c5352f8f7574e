"""Which of vLLM's two model runners a deployment gets: the first, whose decode steps ours can replace."""

from __future__ import annotations

import logging
import os
from typing import Any

from kimi_k2.serving.vllm.support import against_decode_steps, refusal

logger = logging.getLogger("vllm.kimi_k2")

ENVIRONMENT = "VLLM_USE_V2_MODEL_RUNNER"


def choose_runner(vllm_config: Any) -> None:
    """Have vLLM take its first runner on a GPU, where it would take the second and the user has not said which.

    The choice is made in the environment, which all processes of this deployment read, and so does any other engine
    that this process makes later.
    """
    if ENVIRONMENT in os.environ or str(vllm_config.device_config.device_type) != "cuda":
        return
    if not getattr(vllm_config, "use_v2_model_runner", False) or against_decode_steps(vllm_config):
        return
    lacking: Any = getattr(vllm_config, "_get_v1_model_runner_unsupported_features", list)()
    if lacking:
        return
    os.environ[ENVIRONMENT] = "0"
    try:
        refused = bool(vllm_config.use_v2_model_runner)
        refused = refused or refusal(vllm_config, vllm_config.model_config.hf_text_config) is not None
    except ValueError:  # a feature of the second runner alone
        refused = True
    if refused:
        del os.environ[ENVIRONMENT]
        return
    logger.info("kimi-k2: vLLM's first model runner, for decode steps of ours; %s=1 keeps the second", ENVIRONMENT)
