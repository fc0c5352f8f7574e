"""Run in a process of its own: serve requests that arrive in the middle of others' steps; JSON in, JSON out.

Usage: vllm_requests.py MODEL REQUESTS.json RESULT.json; REQUESTS has `dtype`, `requests` (each may have `sampling`,
arguments of vLLM's SamplingParams, `adapter`, its number and directory, and `media`, lists of files, an image or the
frames of a chunk of a video, of which the prompt has a token each) and `options`, which are EngineArgs'. With several
ranks the calls counted are none: the workers make them. `preempted` counts the requests whose pages were taken back.
With `swaps`, each how weights come and of which checkpoint, the requests are served again behind each; `again` has
these tokens; what a connector has `stored` is of no use then. With `steps` the engine is asked so many times. With
`parts` prompts may come in parts. `draft` and `accepted` count drafts' tokens, `verified` and `drafted` steps and
drafts of ours. With `ahead` the scheduler does not wait for a step's end. With two ports `elsewhere` another
engine reads the prompts, and NIXL brings their caches.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from in_workers import Event, amx
from safetensors.torch import load_file

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Of vLLM's.
METRICS = {
    "preempted": "num_preemptions", "draft": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}  # fmt: skip


def count_verified(engine: Any) -> Counter[str]:
    """Steps that ours prepare for drafts, and drafts that they launch behind them, from now on."""
    counts = Counter({"verified": 0, "drafted": 0})

    def count(held: Any, method: str, name: str) -> None:
        called = getattr(held, method)

        def counted(*given: Any) -> Any:
            counts[name] += 1
            return called(*given)

        setattr(held, method, counted)

    steps = None
    with suppress(AttributeError):  # where the engine has a process of its own, or vLLM's worker
        steps = engine.model_executor.driver_worker.worker._steps
    if steps is not None and steps.runner.width > 1:
        count(steps, "run", "verified")
        count(steps, "draft", "drafted")
    return counts


def ahead() -> None:
    """Have vLLM schedule a step before the one before it has ended, which it does not on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)
    vars(torch.cuda).update(stream=lambda _: nullcontext(), current_stream=Event, Stream=Event)
    vars(torch)["Event"] = Event


def balance_on_cpu() -> None:
    """Have vLLM take a configuration that it has for GPUs alone."""
    from vllm.config import parallel

    class Gpu:
        def __getattr__(self, name: str) -> Any:
            return (lambda: True) if name == "is_cuda_alike" else getattr(current_platform, name)

    current_platform = parallel.current_platform
    if current_platform.is_cpu():
        vars(parallel)["current_platform"] = Gpu()


def swap(engine: Any, way: str, directory: str) -> None:
    """Other weights: by vLLM's own reload, or by the model's method, whole or in parts of any tensors."""
    if way.startswith("sleep"):  # weights go to the host and come back; at level 2 they are read again
        engine.sleep(1 + way.endswith("2"))
        if way.endswith("2"):
            engine.wake_up(["weights"])
            engine.collective_rpc("reload_weights")
        engine.wake_up(["kv_cache"] if way.endswith("2") else None)
    elif way == "reload":
        engine.collective_rpc("reload_weights", kwargs={"weights_path": directory})
    else:
        tensors = [one for file in sorted(Path(directory).glob("*.safetensors")) for one in load_file(file).items()]
        parts = [tensors] if way == "whole" else [tensors[first::3] for first in range(3)]
        model = engine.model_executor.driver_worker.worker.get_model()
        for part in parts:
            with torch.inference_mode():
                model.load_weights((name, tensor.clone()) for name, tensor in part)
    engine.reset_prefix_cache()


def read_elsewhere(arguments: Any, requests: list[dict[str, Any]]) -> Any:
    """An engine in a process of its own that has read the prompts; the requests then say where their caches are."""
    from vllm import LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=True)
    asked = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    for number, request in enumerate(requests):
        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=asked)
        engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = {"kv_transfer_params": output.kv_transfer_params}
            requests[int(output.request_id.split("-")[0])]["sampling"] = {"extra_args": found}
    return engine


def main(model: str, job_file: str, result_file: str) -> None:
    from vllm import EngineArgs, LLMEngine

    job = json.loads(Path(job_file).read_text())
    if job.get("parts"):
        amx()
    if any("media" in request for request in job["requests"]):
        # vLLM, in one process, wants a dict of it when it looks for kernels.
        importlib.import_module("llvmlite.binding.ffi").lib._fntab["__dict__"] = {}
    if os.environ.get("VLLM_BATCH_INVARIANT") and not torch.cuda.is_available():
        # vLLM would put Triton kernels for GPUs in the place of PyTorch's functions, on a CPU too.
        from vllm.model_executor.determinism import batch_invariant

        batch_invariant.enable_batch_invariant_mode = lambda: None
    if job["options"].get("enable_return_routed_experts"):  # see `in_workers.routed`
        from vllm.config import VllmConfig

        VllmConfig._verify_aux_output_compatibility = lambda self: None
    if job.get("ahead"):
        ahead()
    if job["options"].get("enable_eplb"):
        balance_on_cpu()
    usual = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True, "skip_tokenizer_init": True}
    arguments = partial(EngineArgs, model=model, dtype=job["dtype"], **{**usual, **job["options"]})
    kept: list[Any] = []
    for port in job.get("elsewhere", ()):
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        kept += [] if kept else [read_elsewhere(arguments(), job["requests"])]
    engine = LLMEngine.from_engine_args(arguments())
    verified = count_verified(engine)
    result = serve(engine, job["requests"], job.get("steps", 0)) | {"again": []}
    for way, directory in job.get("swaps", ()):
        shutil.rmtree(job.get("stored", ""), ignore_errors=True)
        swap(engine, way, directory)
        served = serve(engine, job["requests"])
        result["again"].append(served["tokens"])
        result["logprobs_again"] = served["logprobs"]
    from kimi_k2.ops.registry import TABLE

    counts = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    for name, theirs in METRICS.items():
        result[name] = counts.get(f"vllm:{theirs}", 0)
    calls = {name: {entry.name: entry.calls for entry in (*one.entries, one.plain)} for name, one in TABLE.items()}
    Path(result_file).write_text(json.dumps({**result, "calls": calls, **verified}))


def chunk(files: list[str]) -> dict[str, Any]:
    """An image, or the frames of a video's chunk, as vLLM's K2.5 takes them."""
    from PIL import Image

    frames = [Image.open(path) for path in files]
    if len(frames) == 1:
        return {"type": "image", "image": frames[0], "uuid": None}
    # What it says of its video goes into prompts of text alone; ids have it already.
    return {"type": "video_chunk", "video_chunk": frames, "uuid": None, "prompt": "", "video_idx": 0}


def serve(engine: Any, requests: list[dict[str, Any]], steps: int = 0) -> dict[str, Any]:
    """Tokens and their log-probabilities by request, its prompt as vLLM has it, and the number of steps."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    waiting: list[tuple[int, dict[str, Any]]] = list(enumerate(requests))
    last: dict[int, Any] = {}
    step = 0
    while step < steps if steps else waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1]["arrival"] <= step:
            number, one = waiting.pop(0)
            drawn = {"temperature": 0, "logprobs": 0, **one.get("sampling", {})}
            if "logit_bias" in drawn:  # JSON's keys are text
                drawn["logit_bias"] = {int(token): bias for token, bias in drawn["logit_bias"].items()}
            if "structured_outputs" in drawn:
                drawn["structured_outputs"] = StructuredOutputsParams(**drawn["structured_outputs"])
            sampling = SamplingParams(max_tokens=one["new_tokens"], ignore_eos=True, detokenize=False, **drawn)
            adapter = one.get("adapter")  # its number and directory
            asked = adapter and LoRARequest(adapter[1], *adapter)
            given = {"prompt_token_ids": one["prompt"]}
            if one.get("media"):
                given["multi_modal_data"] = {"vision_chunk": [chunk(files) for files in one["media"]]}
            engine.add_request(str(number), given, sampling, lora_request=asked)
        # Data-parallel ranks ask each other, each as often, and run a step where one of them has requests. An engine in
        # a process of its own would be waited for where it has nothing to do.
        for output in engine.step() if engine.has_unfinished_requests() else ():
            last[int(output.request_id.split("-")[0])] = output  # some versions add to the name
        step += 1
    ended = [last[number] for number in range(len(last))]
    made = [output.outputs[0] for output in ended]
    routed = [getattr(one, "routed_experts", None) for one in made]
    return {
        "steps": step,
        "tokens": [list(one.token_ids) for one in made],
        "logprobs": [
            [at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)] for one in made
        ],
        "prompts": [list(output.prompt_token_ids or ()) for output in ended],
        "routed": [None if experts is None else experts.tolist() for experts in routed],
    }


if __name__ == "__main__":
    main(*sys.argv[1:4])
