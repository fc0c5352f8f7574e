"""vLLM's engine on vllm-neuron's platform, in one process: requests that arrive while others are decoded.

    NXD_CPU_MODE=1 python vllm_worker.py job.json

Nothing of vLLM or vllm-neuron is replaced: its platform, scheduler, worker, runner and loader run as installed, and
find the model through the entry points of `kimi_k2.neuron.vllm`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(NXD_CPU_MODE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Tokens of each request, and what the engine was made of."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(job["directory"], **job["arguments"], additional_config={"override_neuron_config": job["override"]})
    engine: Any = llm.llm_engine
    waiting, step, most = list(enumerate(job["requests"])), 0, 0
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1]["arrival"] <= step:
            number, request = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False
            )
            engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, sampling)
        most = max(most, engine.get_num_unfinished_requests())
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                cached[output.request_id] = output.num_cached_tokens
        step += 1
    runner = engine.model_executor.driver_worker.worker.model_runner
    neuron = runner.model.neuron_config
    return {
        "tokens": [tokens[str(number)] for number in range(len(job["requests"]))],
        "cached": [cached[str(number)] for number in range(len(job["requests"]))],
        "most_at_once": most,
        "platform": type(current_platform).__name__,
        "runner": type(runner).__module__,
        "model": type(runner.model.model).__name__,
        "quantization": neuron.quantization_type if neuron.quantized else None,
    }


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["output"]).write_text(json.dumps(serve(job)))
