"""One rank of NeuronKimiK25ForConditionalGeneration in NxD's CPU mode: a mixed batch, prefill and forced decode."""

from __future__ import annotations

from typing import Any

import environment

environment.prepare()

import torch  # noqa: E402
from steps import run_media  # noqa: E402


def answer(job: dict[str, Any]) -> torch.Tensor:
    """Logits [steps, B, vocab]."""
    config_module, vision = environment.contrib("config"), environment.contrib("vision")
    options = {**job["neuron_config"], "torch_dtype": torch.float32}
    neuron = config_module.KimiK2NeuronConfig(on_cpu=True, **options)
    config = config_module.KimiK2InferenceConfig(neuron, load_config=config_module.load_kimi_config(job["checkpoint"]))
    application = environment.contrib("modeling_kimi_k25").NeuronKimiK25ForConditionalGeneration
    app = application(job["checkpoint"], config)
    app.to_cpu()
    app.load_vision([vision.VisionBucket(*bucket) for bucket in job["buckets"]])
    return run_media(app, torch.load(job["case"]))


if __name__ == "__main__":
    environment.serve(answer)
