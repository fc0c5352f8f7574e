"""NeuronKimiK2ForCausalLM with its graphs lowered and executed on XLA's CPU; logits, dtypes and calls go to a file.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python executed_worker.py job.json

The job is cpu_worker.py's: checkpoint, neuron config, cases, output. All ranks run in this one process. A case may also
be a prompt whose captured tensors are wanted, or steps from given caches.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ["PJRT_DEVICE"] = "CPU"
os.environ.pop("NXD_CPU_MODE", None)

import environment

environment.prepare(cpu=False)

import executed  # noqa: E402
import prefix  # noqa: E402
import torch  # noqa: E402
from steps import application, captured, decode_from, run, run_drafted  # noqa: E402


def load(app: Any) -> None:
    """Give `app` the executed graphs as its device."""
    executed.load(app)


def build(job: dict[str, Any]) -> Any:
    """The application, not loaded; XLA cannot execute kernels, in whose place PyTorch's forms are."""
    environment.leave_out([*job.get("without", []), "NkiKernel"])
    return application(job, on_cpu=False, dtype="bfloat16")


def loaded_types(app: Any) -> dict[str, str]:
    """dtype of every floating parameter and buffer of the decode module after NxDI's `load_module` has cast it."""
    from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_process_group

    lowering = environment.contrib("lowering")
    wrapper = app.models[-1]
    with lowering.mocked_ranks(wrapper.neuron_config):
        instance = wrapper.get_model_instance()
        initialize_moe_process_group(wrapper.config, False)
        with torch.device("meta"):
            instance.load_module()
        tensors = [*instance.module.named_parameters(), *instance.module.named_buffers()]
    return {name: str(tensor.dtype) for name, tensor in tensors if tensor.is_floating_point()}


def results(app: Any, cases: list[dict[str, Any]]) -> list[Any]:
    """What each case gives, each from empty caches; `app` is loaded."""
    device = app.traced_model.nxd_model
    found: list[Any] = []
    for case in cases:
        app.reset()
        device.clear()
        if "caches" in case:
            device.fill(torch.load(case["caches"]))
            found.append(decode_from(app, case["start"], case["forced"]))
        elif "script" in case:
            found.append(torch.stack(prefix.run(app, case["script"])))
        elif "accepted" in case:
            width = app.neuron_config.speculation_length
            found.append(run_drafted(app, case["prompts"], case["forced"], width, case["accepted"]))
        elif "capture" in case:
            found.append(captured(app, case["capture"], case.get("forced", [])))
        else:
            found.append(run(app, case["prompts"], case["forced"], case.get("arrival"), case.get("adapters")))
    return found


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    job = json.loads(Path(sys.argv[1]).read_text())
    app = build(job)
    device = executed.load(app).nxd_model
    found = results(app, job["cases"])
    graphs = [
        {
            "stage": graph.stage,
            "bucket": graph.bucket,
            "types": executed.parameter_types(graph),
            "hlo": graph.hlo,
        }
        for graph in device.graphs
    ]
    facts = {"logits": found, "graphs": graphs, "calls": device.calls, "loaded": loaded_types(app)}
    torch.save(facts, job["output"])


if __name__ == "__main__":
    main()
