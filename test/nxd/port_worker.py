"""The published port (pull request 131 of neuronx-distributed-inference) on the same job as worker.py, one rank.

The job's `port` names the folder that holds its modeling_kimi_k2.py; nothing of it is kept here.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import environment
import torch
import worker


def build(job: dict[str, Any]) -> Any:
    """The port's application in CPU mode."""
    sys.path.insert(0, job["port"])
    port = importlib.import_module("modeling_kimi_k2")
    fields = environment.contrib("config").load_kimi_config(job["checkpoint"])

    def load(target: Any) -> None:
        fields(target)
        target.attention_dropout = 0.0
        target.output_attentions = target.output_hidden_states = False
        target.return_dict = target.use_cache = True

    options = {**job["neuron_config"], "torch_dtype": torch.float32, "on_cpu": True}
    options["router_config"] = {"dtype": torch.float32, "act_fn": "sigmoid"}
    neuron = port.KimiK2InferenceConfig.get_neuron_config_cls()(**options)
    config = port.KimiK2InferenceConfig(neuron, load_config=load)
    app = port.NeuronKimiK2ForCausalLM(job["checkpoint"], config)
    app.to_cpu()
    return app


if __name__ == "__main__":
    worker.build = build
    environment.serve(worker.answer)
