"""vLLM's ways to share a model between two Hopper GPUs, or engines: in each, ours beside vLLM's own model.

All engines come up beside each other, as many at once as there are cores for; the answers are judged as they come.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from judge import ROUNDING, Judge, write_slice
from sampling import PROCESSORS, forced
from vllm_engine import serve

needs.engine("vllm")
pytestmark = needs.on_hoppers(2)

MODELS = {"fp8": "kimi-k2-instruct-0905", "int4": "kimi-k2-thinking"}
AT_ONCE = max(2, len(os.sched_getaffinity(0)) // 4)
EPLB = {"window_size": 16, "step_interval": 32, "num_redundant_experts": 2}
TRANSFER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
REPLICAS = {"replicas": 2, "enable_expert_parallel": True}
FORMS: dict[str, dict[str, Any]] = {
    # That connector stores whole prompts, so none may come in parts, and by whole pages, of which all need one.
    "caches moved": {"kv_transfer_config": TRANSFER, "max_num_batched_tokens": 8192},
    "data parallel": {**REPLICAS},
    "FP8 cache": {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"},
    "pipeline": {"pipeline_parallel_size": 2},
    "experts moved": {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True,
                      "eplb_config": {**EPLB, "use_async": False}},
    "experts moved beside steps": {**REPLICAS, "enable_eplb": True, "eplb_config": {**EPLB, "use_async": True}},
    "asleep": {"enable_sleep_mode": True, "swaps": [("sleep", "")]},
    "caches spread": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "FP8 caches spread": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "kv_cache_dtype": "fp8",
                          "dcp_kv_cache_interleave_size": 64},
}  # fmt: skip
OURS = "kimi-k2: operations are ours ("
# In the log of an engine of that form; of the first rank, but of the second of two engines that share caches.
SAID = {
    "experts moved": "Rearranging experts sync mode ...", "experts moved beside steps": "experts (async mode) ...",
    "caches moved": "External Cache Hit", "asleep": "to fall asleep",
    **dict.fromkeys(("caches spread", "FP8 caches spread"), "decode_context_parallel_size=2"),
}  # fmt: skip
STOCK = {"VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
OPTIONS = {
    "max_model_len": 2048, "max_num_seqs": 12, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 300_000_000,
    "gpu_memory_utilization": 0.05, "enable_prefix_caching": False, "logits_processors": PROCESSORS,
}  # fmt: skip


def requests(replica: int = 0, shortest: int = 1) -> list[dict[str, Any]]:
    """Prompts of up to 1,300 tokens, arriving during others' steps: each with given answers, then with its own."""
    draw, arrival = random.Random(7 + replica), 0
    job: list[dict[str, Any]] = []
    for length in (shortest, 1300, 700, *(shortest + 62 + more for more in range(3)), 512, 900):
        prompt = [draw.randrange(10, 700) for _ in range(length)]
        given = forced([draw.randrange(10, 700) for _ in range(64)])
        for more in ({"sampling": given}, {}):
            job.append({"prompt": prompt, "new_tokens": 64, "arrival": arrival, **more})
            arrival += draw.randint(0, 6)
    return job


def answers(directory: Path, form: str, ours: bool, tmp_path: Path) -> list[tuple[list[Any], dict[str, Any], str]]:
    """The requests, what was answered, and the log; of each replica, or of both engines that share caches."""
    options: dict[str, Any] = {**OPTIONS, **FORMS[form], "enforce_eager": not ours}
    environment = dict(STOCK)
    replicas, swaps = options.pop("replicas", 1), options.pop("swaps", ())
    if form in ("caches moved", "asleep"):  # one GPU each
        environment["CUDA_VISIBLE_DEVICES"] = str(int(ours == (form == "asleep")))
    if "kv_transfer_config" in options:
        stored = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "stored")}}
        options["kv_transfer_config"] = TRANSFER | stored
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def one(number: int) -> tuple[list[Any], dict[str, Any], str]:
        place = {"RANK": number, "RANK_LOCAL": number, "SIZE": replicas, "MASTER_PORT": port, "MASTER_IP": "127.0.0.1"}
        named = {f"VLLM_DP_{name}": str(value) for name, value in place.items()} if replicas > 1 else {}
        # Engines in processes of their own keep step with each other, also where they run ahead; and vLLM's thread
        # that moves experts, which it never ends, aborts none but them.
        if replicas > 1:
            named["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        out = tmp_path / str(number)
        job = requests(number) if replicas > 1 else requests(shortest=66 if form == "caches moved" else 1)
        out.mkdir(parents=True)
        served = serve(
            directory, "bfloat16", job, out, plugins="kimi_k2" if ours else "kimi_k2_parsers", timeout=300, swaps=swaps,
            environment=environment | named, **options,
        )  # fmt: skip
        return job, *served

    if form == "caches moved":
        return [one(0), one(1)]
    with ThreadPoolExecutor(replicas) as pool:
        return list(pool.map(one, range(replicas)))


Running = dict[tuple[str, str, bool], Future[Any]]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """All engines that the tests here ask for, by experts, form and whether they are ours."""
    wanted = [
        (str(item.callspec.params["experts"]), str(item.callspec.params["form"]))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    made: Running = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for experts, form in wanted:
            directory = tmp_path_factory.getbasetemp() / experts
            if not directory.exists():
                write_slice(directory, MODELS[experts], ranks=2)
            for ours in (True, False):
                out = tmp_path_factory.mktemp("engine")
                made[experts, form, ours] = pool.submit(answers, directory, form, ours, out)
        yield made


@pytest.fixture(scope="module")
def judges(running: Running, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judge]:
    """In float64, by experts."""
    return {name: Judge(tmp_path_factory.getbasetemp() / name, torch.float64) for name in {key[0] for key in running}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("experts", MODELS)
def test_no_farther_from_float64_than_vllms_own(
    experts: str, form: str, running: Running, judges: dict[str, Judge]
) -> None:
    """The mean error of given answers' log-probabilities, by no more than twice its standard error; own answers too.

    Of greedy answers as many tokens are float64's best as of vLLM's model, but for four standard deviations.
    """
    errors: dict[str, torch.Tensor] = {}
    figures: dict[str, Any] = {"experts": experts, "form": form}
    for who in ("ours", "stock"):
        try:
            served = running[experts, form, who == "ours"].result()
        except (
            AssertionError,
            subprocess.TimeoutExpired,
        ) as error:  # an engine ended: vLLM's own may not have this form
            assert who == "stock", error
            figures["stock"] = str(error)[-600:]
            break
        found, gaps = [], []
        for number, (job, answer, log) in enumerate(served):
            assert (OURS in log) == (who == "ours")
            assert SAID.get(form, "") in log or number != int(form == "caches moved")
            for at, (one, tokens, said) in enumerate(zip(job, answer["tokens"], answer["logprobs"], strict=True)):
                if "sampling" in one:
                    assert tokens == one["sampling"]["extra_args"]["forced"]
                    found.append(judges[experts].errors(one["prompt"], tokens, said))
                    continue
                both = [tokens, *(again[at] for again in answer["again"])]
                gaps += [judges[experts].gaps(one["prompt"], each) for each in both]
        errors[who] = torch.cat(found)
        figures[who] = {
            "mean": float(errors[who].mean()), "99 %": float(errors[who].quantile(0.99)),
            "best": sum(int((gap == 0).sum()) for gap in gaps), "of": sum(map(len, gaps)),
            "largest mean gap": max(float(gap.mean()) for gap in gaps),
        }  # fmt: skip
    compared = len(errors) == 2
    if compared:
        farther = errors["ours"] - errors["stock"]
        figures["ours less stock"] = float(farther.mean())
        figures["standard error"] = float(farther.std()) / len(farther) ** 0.5
    print(f"\nfigures {json.dumps(figures)}", flush=True)
    assert figures["ours"]["mean"] < 0.06
    assert figures["ours"]["largest mean gap"] < ROUNDING
    if compared:
        assert figures["ours less stock"] < 2 * figures["standard error"]
        assert figures["ours"]["best"] > figures["stock"]["best"] - 4 * figures["stock"]["best"] ** 0.5
