"""The folder's graphs in BF16, lowered and executed on XLA's CPU, all ranks in one process, on a job's cases.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python folder_executed_worker.py job.json
"""

from __future__ import annotations

import importlib
import os
from typing import Any

os.environ["PJRT_DEVICE"] = "CPU"
os.environ.pop("NXD_CPU_MODE", None)

import environment

environment.prepare(cpu=False)

import executed  # noqa: E402
import torch  # noqa: E402
from steps import run  # noqa: E402


def answer(job: dict[str, Any]) -> list[torch.Tensor]:
    """Logits of the cases, each from empty caches."""
    src: Any = importlib.import_module("kimi_k2.contrib_model")
    neuron = src.KimiK2NeuronConfig(**job["neuron_config"])
    config = src.KimiK2InferenceConfig(neuron, load_config=src.load_kimi_config(job["checkpoint"]))
    app = src.NeuronKimiK2ForCausalLM(job["checkpoint"], config)
    executed.load(app)
    found = []
    for case in job["cases"]:
        app.reset()
        app.traced_model.nxd_model.clear()
        found.append(run(app, case["prompts"], case["forced"], case.get("arrival")))
    return found


if __name__ == "__main__":
    environment.serve(answer)
