"""Applications of jobs, on gloo ranks and on executed graphs alike, and what they answer to a script.

A job is a mapping:
    checkpoint: its directory; neuron_config: options of NxDI.
    scripts: what is run, each from empty caches: an object with `run(app, **more)`; `more` goes to every call.
    folder: the module of the folder of contrib/models, in place of the package's class.
    draft: directory of a head that drafts in the graph; of a preset's, `draft_tokens`.
    preset: the name of a deployment, brought down to CPU mode by the arguments of `deployment` (with `sampling` on the
        device), in place of options; `overrides` are further ones. Of executed graphs `ranks` too.
    without_kernel: operations stand for the kernel of whole layers.
    dtypes: whether `dtypes` are answered too.
    carry_on: whether an error is an answer.
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import environment
import folder_cpu
import torch
from faults import FAULTS, patch

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.deployment import Deployment, OnDeviceSampling
from nki_emulator.launch import Kernel

Job = Mapping[str, Any]
Answer = dict[str, Any]


def application(job: Job) -> Any:
    """The job's application, not loaded."""
    if "folder" not in job and (environment.executed() or job.get("without_kernel")):
        environment.leave_out_the_kernel()  # which XLA cannot execute
    directory = str(job["checkpoint"])
    if "preset" in job:
        return of_preset(job, directory)
    options = {"torch_dtype": "bfloat16" if environment.executed() else "float32", **job["neuron_config"]}
    options |= {"torch_dtype": getattr(torch, options["torch_dtype"]), "on_cpu": not environment.executed()}
    return of_options(directory, job["checkpoint"], options, job.get("folder"), job.get("draft"))


def of_options(directory: str, source: Any, options: Mapping[str, Any], folder: Any = None, draft: Any = None) -> Any:
    """The same of options and a source of configuration: the package's, or of a folder's module."""
    if folder:
        config = modeling = importlib.import_module(folder)
    else:
        config, modeling = environment.contrib("config"), environment.contrib("modeling_kimi_k2")
    neuron = config.KimiK2NeuronConfig(**options)
    inference = config.KimiK2InferenceConfig(neuron, load_config=config.load_kimi_config(source))
    if draft:
        inference = environment.contrib("draft_head").with_draft(inference, draft)
    return modeling.NeuronKimiK2ForCausalLM(directory, inference)


def of_preset(job: Job, directory: str) -> Any:
    """The same of a preset."""
    from kimi_k2.neuron.application import cpu_deployment
    from kimi_k2.neuron.compile import build_application
    from kimi_k2.plan.nxdi import draft_options

    preset, executed = Deployment.load(job["preset"]), environment.executed()
    given = {"length": 64, "batch_size": preset.batch_size, **job.get("deployment", {})}
    if "sampling" in job:
        given["sampling"] = OnDeviceSampling(**job["sampling"])
    if executed or torch.distributed.is_initialized():  # an application before this one took it away
        ranks = job["ranks"] if executed else torch.distributed.get_world_size()
        os.environ["WORLD_SIZE"] = str(ranks)
    tiny = cpu_deployment(preset, **given)
    if executed:
        del os.environ["WORLD_SIZE"]
    options = {"disable_argmax_kernel": True} if executed else {"on_cpu": True}
    options |= (draft_options(job["draft_tokens"]) if "draft" in job else {}) | job.get("overrides", {})
    config = KimiK2Config.from_pretrained(directory)
    return build_application(tiny, config, directory, draft=job.get("draft"), **options)


def build(job: Job) -> Any:
    """The application, loaded."""
    app = application(job)
    if environment.executed():
        import executed

        executed.load(app)
    elif "folder" in job:
        folder_cpu.load(app)
    else:
        folder_cpu.give_up_groups()
        app.load("") if "preset" in job else app.to_cpu()
    return app


def dtypes(job: Job) -> Answer:
    """Of the job in BF16: every floating parameter and buffer of the decode module after NxDI's `load_module` has cast
    it, and both graphs, as text and by the element types of their parameters.
    """
    from executed import parameter_types

    app = application({**job, "neuron_config": {**job["neuron_config"], "torch_dtype": "bfloat16"}})
    lowering, wrapper = environment.contrib("lowering"), app.models[-1]
    with lowering.mocked_ranks(wrapper.neuron_config):
        instance = wrapper.get_model_instance()
        with torch.device("meta"):
            instance.load_module()
        tensors = [*instance.module.named_parameters(), *instance.module.named_buffers()]
    graphs = [lowering.lower(app, stage) for stage in lowering.STAGES]
    return {
        "loaded": {name: str(tensor.dtype) for name, tensor in tensors if tensor.is_floating_point()},
        "graphs": [{"stage": graph.stage, "types": parameter_types(graph), "hlo": graph.hlo} for graph in graphs],
    }


def answer(job: Job) -> Answer:
    """Logits of each script; kernels that ran, or of executed graphs which were called and, by dtypes, what is in them.

    What is refused is answered by its field.
    """
    try:
        app = build(job)
    except ValueError as error:
        if not hasattr(error, "field"):
            raise
        return {"refused": error.field, "message": str(error)}
    device = app.traced_model.nxd_model if environment.executed() else None
    logits, ran, inner = [], Counter[str](), Kernel.run

    def counted(kernel: Kernel, *args: Any) -> Any:
        ran[kernel.__name__] += 1
        return inner(kernel, *args)

    for script in job["scripts"]:
        app.reset()
        if device is not None:
            device.clear()
        with mock.patch.object(Kernel, "run", counted):
            logits.append(script.run(app, **job.get("more", {})))
    found: Answer = {"logits": logits, "kernels": dict(ran), "decode": getattr(app.neuron_config, "decode", "xla")}
    if device is not None:
        found["calls"] = device.calls
    return {**found, **(dtypes(job) if job.get("dtypes") else {})}


@torch.inference_mode()
def answers(jobs: Mapping[str, Job], table: str = "") -> dict[str, Answer]:
    """Of each job, one after the other, and of each fault of a table that is listed with one of them."""
    tries: list[tuple[str, str, Any]] = [(name, name, None) for name in jobs]
    tries += [(fault, name, replaced) for name in jobs for fault, *replaced in FAULTS.get(table, {}).get(name, ())]
    found: dict[str, Answer] = {}
    for label, name, replaced in tries:
        try:
            with mock.patch.object(*patch(*replaced)) if replaced else nullcontext():
                found[label] = answer(jobs[name])
        except Exception:
            if not (replaced or jobs[name].get("carry_on")):
                raise
            found[label] = {"error": traceback.format_exc()}
        print(label, {key: one for key, one in found[label].items() if key not in ("logits", "graphs")}, flush=True)
    return found
