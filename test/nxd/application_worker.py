"""Generations with NeuronApplication in CPU mode, in a process of its own: it takes the process group of its ranks.

    python application_worker.py job.json

The job names a checkpoint, a preset, what `cpu_deployment` is told, and calls; the answer holds each call's tokens or
the message of its error.
"""

from __future__ import annotations

from typing import Any

import environment
import torch

from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import KimiK2Error
from kimi_k2.neuron.application import NeuronApplication, cpu_deployment
from kimi_k2.plan.deployment import Deployment, OnDeviceSampling


def call(app: NeuronApplication, prompts: list[list[int]], params: dict[str, Any]) -> Any:
    """Tokens of each sequence, or an error's message."""
    tokens: list[list[int]] = [[] for _ in prompts]
    try:
        for step in app.stream(prompts, SamplingParams(**{"ignore_eos": True, **params})):
            for row, token in zip(tokens, step.tokens, strict=True):
                if token is not None:
                    row.append(token)
    except KimiK2Error as error:
        return str(error)
    return tokens


def adapted(app: NeuronApplication, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens by NxDI's own HuggingFaceGenerationAdapter over the same application."""
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
    from transformers import GenerationConfig

    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in prompts])
    options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, top_k=1)
    out = HuggingFaceGenerationAdapter(app.app).generate(ids, attention_mask=mask, generation_config=options)
    found: list[list[int]] = out[:, width:].tolist()
    return found


def answer(job: dict[str, Any]) -> list[Any]:
    """What each call gives."""
    deployment = dict(job["deployment"])
    if "sampling" in deployment:
        deployment["sampling"] = OnDeviceSampling(**deployment["sampling"])
    preset = cpu_deployment(Deployment.load(job["preset"]), **deployment)
    app = NeuronApplication.load(job["checkpoint"], preset, None, **job.get("overrides", {}))
    return [
        adapted(app, one["prompts"], one["adapter"])
        if "adapter" in one
        else call(app, one["prompts"], one.get("params", {}))
        for one in job["calls"]
    ]


if __name__ == "__main__":
    environment.serve(answer)
