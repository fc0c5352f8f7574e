"""NeuronKimiK2ForCausalLM on a job's cases; logits and what the application was made of go to a file.

WORLD_SIZE=2 RANK=0 NXD_CPU_MODE=1 ... python worker.py job.json    (one rank in NxD's CPU mode)
XLA_FLAGS=--xla_force_host_platform_device_count=2 python worker.py job.json    (all ranks: graphs lowered and executed)

The job names the checkpoint, the neuron config, the cases (steps.result) and the output file.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from typing import Any
from unittest import mock

import environment

EXECUTED = "NXD_CPU_MODE" not in os.environ
if EXECUTED:
    os.environ["PJRT_DEVICE"] = "CPU"
environment.prepare(cpu=not EXECUTED)

import torch  # noqa: E402
from steps import application, result  # noqa: E402

from nki_emulator.launch import Kernel  # noqa: E402


def build(job: dict[str, Any]) -> Any:
    """The application, loaded; XLA cannot execute kernels, in whose place PyTorch's forms are."""
    app = unloaded(job)
    if EXECUTED:
        import executed

        executed.load(app)
    else:
        app.to_cpu()
    return app


def unloaded(job: dict[str, Any]) -> Any:
    """The application without its weights."""
    if EXECUTED or job.get("without_kernel"):
        environment.leave_out_the_kernel()
    return application(job, on_cpu=not EXECUTED, dtype="bfloat16" if EXECUTED else "float32")


def loaded_types(app: Any) -> dict[str, str]:
    """dtype of every floating parameter and buffer of the decode module after NxDI's `load_module` has cast it."""
    lowering = environment.contrib("lowering")
    wrapper = app.models[-1]
    with lowering.mocked_ranks(wrapper.neuron_config):
        instance = wrapper.get_model_instance()
        with torch.device("meta"):
            instance.load_module()
        tensors = [*instance.module.named_parameters(), *instance.module.named_buffers()]
    return {name: str(tensor.dtype) for name, tensor in tensors if tensor.is_floating_point()}


def results(app: Any, cases: list[dict[str, Any]]) -> list[Any]:
    """What each case gives, each from empty caches."""
    found: list[Any] = []
    for case in cases:
        app.reset()
        if EXECUTED:
            app.traced_model.nxd_model.clear()
            if "caches" in case:
                app.traced_model.nxd_model.fill(torch.load(case["caches"]))
        found.append(result(app, case))
    return found


class Counted:
    """An application whose kernels are counted in passes of at most `width` tokens a line."""

    def __init__(self, app: Any, width: int) -> None:
        self.app, self.width, self.ran = app, width, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)

    def __call__(self, input_ids: torch.Tensor, **given: Any) -> Any:
        inner, ran = Kernel.run, self.ran

        def counted(kernel: Kernel, *args: Any) -> Any:
            ran[kernel.__name__] += 1
            return inner(kernel, *args)

        with mock.patch.object(Kernel, "run", counted if input_ids.shape[1] <= self.width else inner):
            return self.app(input_ids=input_ids, **given)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Logits of the cases; kernels that ran, or of executed graphs what there is in each, and which were called."""
    app = build(job)
    if not EXECUTED:
        counted = Counted(app, sys.maxsize)
        return {"logits": results(counted, job["cases"]), "kernels": dict(counted.ran)}
    from executed import parameter_types

    device = app.traced_model.nxd_model
    graphs = [
        {"stage": one.stage, "bucket": one.bucket, "types": parameter_types(one), "hlo": one.hlo}
        for one in device.graphs
    ]
    found = results(app, job["cases"])
    return {"logits": found, "graphs": graphs, "calls": device.calls, "loaded": loaded_types(app)}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    environment.serve(answer)
