"""vLLM on Hopper GPUs with our model in it, by forms of deployment; the plain model in float64 is the measure.

Ours and vLLM's own model say the log-probabilities of the same tokens, drawn beforehand: a few errors are a hundred
times the median, where rounding has chosen another expert, so ours may be larger in the mean by no more than twice the
standard error that this leaves in the difference. All engines come up beside each other, as many at once as there are
cores for; the answers are judged as they come.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from adapters import merge, write_adapter
from engines import OURS, PROCESSORS, SAMPLING, STOCK, Served, forced, serve_replicas
from heads import write_following_head
from judge import ROUNDING, Judge, slice_config

from kimi_k2.config import KimiK2Config
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint

engines.need("vllm")
pytestmark = engines.on_hoppers()

MODELS = {"fp8": "kimi-k2-instruct-0905", "int4": "kimi-k2-thinking"}
AT_ONCE = max(2, len(os.sched_getaffinity(0)) // 4)
OPTIONS = {
    "max_model_len": 2048, "max_num_seqs": 12, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 300_000_000,
    "gpu_memory_utilization": 0.05, "enable_prefix_caching": False, "enforce_eager": False,
}  # fmt: skip
EPLB = {"window_size": 16, "step_interval": 32, "num_redundant_experts": 2}
EXPERTS_MOVED = {"enable_expert_parallel": True, "enable_eplb": True}
TWO, SPREAD = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
GRAPHS_OFF = {"KIMI_K2_VLLM_DECODE_GRAPHS": "0"}
PIECES = "are replayed"  # steps with prompts
WITHOUT_EXPERTS = [
    "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fused_qkv_a_proj",
    "gate_up_proj",
]  # fmt: skip

Job = list[dict[str, Any]]


@dataclass(frozen=True)
class Form:
    """A deployment.

    Attributes:
        options: of the engine.
        said: how often a line is in the log of each of our engines.
        gpus: that it takes.
        replicas: data-parallel ranks.
        of: ranks of the published model, each of whose sizes a GPU has.
        experts: of the model; None for few.
        told: what vllm_requests.py is told.
        environment: of our engines.
        stock: whether vllm's own model is asked too.
        again: environment of another engine of ours, whose answers must be the same bits.
        prepare: changes requests, and gives options; of the model's directory, a folder and the requests.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    said: Mapping[str, int] = field(default_factory=dict)
    gpus: int = 1
    replicas: int = 1
    of: int = 8
    experts: int | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    stock: bool = True
    again: Mapping[str, str] | None = None
    prepare: Callable[[Path, Path, Job], dict[str, Any]] = lambda *_: {}


def requests(replica: int = 0, shortest: int = 1) -> Job:
    """Prompts of up to 1,300 tokens, arriving during others' steps: each with given answers, then with its own."""
    draw, arrival = random.Random(7 + replica), 0
    job: Job = []
    for length in (shortest, 1300, 700, *(shortest + 62 + more for more in range(3)), 512, 513, 900):
        prompt = [draw.randrange(10, 700) for _ in range(length)]
        given = forced([draw.randrange(10, 700) for _ in range(64)])
        for more in ({"sampling": given}, {}):
            job.append({"prompt": prompt, "new_tokens": 64, "arrival": arrival, **more})
            arrival += draw.randint(0, 6)
    return job


def own_answers(_: Path, __: Path, job: Job) -> dict[str, Any]:
    """In place of the given ones: vLLM takes no processor of logits beside drafts, nor in its second runner."""
    for request in job:
        request.pop("sampling", None)
    return {"logits_processors": None}


def sampling(_: Path, __: Path, job: Job) -> dict[str, Any]:
    """Every size has its graphs, so no padding differs; requests are preempted."""
    for at, request in enumerate(job):
        request["sampling"] = SAMPLING[at % len(SAMPLING)]
    return {"compilation_config": {"cudagraph_capture_sizes": list(range(1, 13))}, "num_gpu_blocks_override": 34}


def adapters(directory: Path, out: Path, job: Job) -> dict[str, Any]:
    """Two adapters and none in one batch."""
    with torch.device("meta"):
        model = KimiK2ForCausalLM(KimiK2Config.from_pretrained(directory), dtype=torch.bfloat16)
    for rank in (16, 8):
        write_adapter(model, out / f"adapter{rank}", rank, rank, experts=out.name.startswith("experts"))
    for number, request in enumerate(job):
        if number // 2 % 3:
            request["adapter"] = [number // 2 % 3, str(out / f"adapter{8 * (number // 2 % 3)}")]
    return {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}


def drafts(form: Any, intermediate_size: int = 512) -> Callable[[Path, Path, Job], dict[str, Any]]:
    """A head that knows what often follows a token."""

    def prepare(directory: Path, out: Path, job: Job) -> dict[str, Any]:
        own = own_answers(directory, out, job)
        with torch.device("meta"):
            ranks = KimiK2Config.from_pretrained(directory).num_attention_heads // 8
        ((plain, _),) = serve_replicas(
            directory, "bfloat16", [job], out / "plain", {}, tensor_parallel_size=ranks, **OPTIONS
        )
        target = KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        sizes = {"intermediate_size": intermediate_size}
        write_following_head(out / "head", target, plain["tokens"], form, **sizes)
        about = {"method": "eagle3", "model": str(out / "head"), "num_speculative_tokens": 3}
        sizes_captured = {"cudagraph_capture_sizes": list(range(4, 49, 4))}
        return {"speculative_config": about, "compilation_config": sizes_captured, **own}

    return prepare


def alone(_: Path, __: Path, job: Job) -> dict[str, Any]:
    """A prompt of 512 and one, the size of a part, and one of a token."""
    job[2]["prompt"], job[4]["prompt"] = job[2]["prompt"][:513], job[2]["prompt"][:1]
    return {}


def moved(_: Path, out: Path, job: Job) -> dict[str, Any]:
    """That connector stores whole prompts, so none may come in parts, and by whole pages, of which all need one."""
    job[:] = requests(shortest=66)
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    transfer |= {"kv_connector_extra_config": {"shared_storage_path": str(out / "stored")}}  # type: ignore[dict-item]
    return {"kv_transfer_config": transfer, "max_num_batched_tokens": 8192}


SLEEPS = {"swaps": [(way, "") for way in ("sleep", "sleep2", "sleep")]}
FORMS: dict[str, Form] = {
    "first runner": Form(said={"Using V2 Model Runner": 0, PIECES: 1}, environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "second runner": Form(said={"Using V2 Model Runner": 1}, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
                          stock=False, prepare=own_answers),
    "a rank of sixteen": Form(of=16, stock=False),
    "asleep": Form({"enable_sleep_mode": True}, {"to fall asleep": 3}, told=SLEEPS, stock=False),
    "sampling": Form({"async_scheduling": True}, again=GRAPHS_OFF, stock=False, prepare=sampling),
    "sampling one by one": Form({"async_scheduling": False}, again=GRAPHS_OFF, stock=False, prepare=sampling),
    "drafts": Form(prepare=drafts("llama"), again=GRAPHS_OFF, stock=False),
    "drafts one by one": Form({"async_scheduling": False}, prepare=drafts("llama"), again=GRAPHS_OFF, stock=False),
    "drafts of MLA": Form(prepare=drafts("mla"), again=GRAPHS_OFF, stock=False),
    # The router of batch-invariant mode takes the real model's experts.
    "invariant": Form({"enable_prefix_caching": True}, {"no prefix caching": 1, "follow each other on the GPU": 1},
                      experts=384, environment={"VLLM_BATCH_INVARIANT": "1"}, stock=False, prepare=alone,
                      again={"VLLM_BATCH_INVARIANT": "1"}),
    "adapters": Form({"lora_target_modules": WITHOUT_EXPERTS}, prepare=adapters),
    "experts' adapters": Form(prepare=adapters),
    "adapters of two": Form({"lora_target_modules": WITHOUT_EXPERTS, **TWO}, gpus=2, prepare=adapters),
    "experts' adapters of two": Form(TWO, gpus=2, prepare=adapters),
    "cut": Form(TWO, {PIECES: 2}, gpus=2),
    "shared out": Form({**TWO, "enable_expert_parallel": True}, {PIECES: 2}, gpus=2),
    "drafts of two": Form(TWO, {"drafter are prepared by vLLM: a head of several ranks": 2, "decode steps of up to": 2},
                          gpus=2, prepare=drafts("llama", 1024), stock=False),
    "one cannot capture": Form({**TWO, "worker_extension_cls": "in_workers.Piece20"},
                               {"384 tokens: another rank cannot": 1, PIECES: 0,
                                "384 tokens: refused by the second rank": 1}, gpus=2, stock=False),
    "caches moved": Form(gpus=2, prepare=moved, again={}),
    "data parallel": Form({"enable_expert_parallel": True}, gpus=2, replicas=2),
    "FP8 cache": Form({**TWO, "kv_cache_dtype": "fp8"}, gpus=2),
    "pipeline": Form({"pipeline_parallel_size": 2}, gpus=2),
    "experts moved": Form({**TWO, **EXPERTS_MOVED, "eplb_config": {**EPLB, "use_async": False}}, gpus=2),
    "experts moved beside steps": Form({**EXPERTS_MOVED, "eplb_config": {**EPLB, "use_async": True}}, gpus=2,
                                       replicas=2),
    "caches spread": Form(SPREAD, gpus=2),
    "FP8 caches spread": Form({**SPREAD, "kv_cache_dtype": "fp8", "dcp_kv_cache_interleave_size": 64}, gpus=2),
}  # fmt: skip
# Once or more in the log of the first replica.
IN_LOG = {
    "experts moved": "Rearranging experts sync mode ...", "experts moved beside steps": "experts (async mode) ...",
    **dict.fromkeys(("caches spread", "FP8 caches spread"), "context_parallel"),
}  # fmt: skip

Answers = tuple[list[Job], list[Served]]


def answers(directory: Path, name: str, out: Path) -> dict[str, Answers]:
    """Requests, answers and logs by replica, of ours, of ours again where the form asks for it, and of stock."""
    form, found = FORMS[name], dict[str, Answers]()
    jobs = [requests(replica) for replica in range(form.replicas)]
    options = {**OPTIONS, "logits_processors": PROCESSORS, **form.options, **form.prepare(directory, out, jobs[0])}
    environment = {name: value for name, value in STOCK.items() if name != "VLLM_PLUGINS"} | dict(form.environment)
    if form.replicas > 1:
        # Engines in processes of their own keep step with each other, also where they run ahead; and vLLM's thread
        # that moves experts, which it never ends, aborts none but them.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    given = {"ours": environment}
    if form.again is not None:
        given["again"] = environment | dict(form.again)
    if form.stock:
        given["stock"] = environment | STOCK
    for who, variables in given.items():
        if who == "again" and form.experts is not None:  # by themselves, whole
            jobs = [[{**request, "arrival": 90 * number} for number, request in enumerate(jobs[0])]]
            options["max_num_batched_tokens"] = 2048
        told = {"told": dict(form.told), "timeout": 300}
        try:
            found[who] = jobs, serve_replicas(directory, "bfloat16", jobs, out / who, variables, **told, **options)
        except (AssertionError, subprocess.TimeoutExpired) as error:  # vLLM's own may not have this form
            assert who == "stock", error
            print(f"stock does not serve {name}: {str(error)[-600:]}")
    return found


Running = dict[tuple[str, str], tuple[Path, Future[dict[str, Answers]]]]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """All engines that the tests here ask for, by experts and form, and their models."""
    submitted: Running = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for item in request.session.items:
            if not isinstance(item, pytest.Function) or item.module is not request.module:
                continue
            experts, name = (str(item.callspec.params[what]) for what in ("experts", "name"))
            form = FORMS[name]
            if form.gpus > torch.cuda.device_count():
                continue
            directory = tmp_path_factory.getbasetemp() / f"{experts}-{form.gpus}-{form.of}-{form.experts}"
            if not directory.exists():
                config = slice_config(MODELS[experts], form.gpus, form.of)
                more = {} if form.experts is None else {"n_routed_experts": form.experts}
                write_synthetic_checkpoint(directory, config.model_copy(update=more), seed=3)
            out = tmp_path_factory.mktemp("adapters" if "adapters" in name else "engine")
            submitted[experts, name] = directory, pool.submit(answers, directory, name, out)
        yield submitted


judge_of = lru_cache(maxsize=2)(Judge)


def judged(directory: Path, served: Answers, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor], float]:
    """Errors of given answers' log-probabilities, else of own ones; own ones' gaps to the best; another's gap."""
    errors, own, gaps, others = [], [], [], []
    for adapter in {tuple(request.get("adapter") or ()) for job in served[0] for request in job}:
        judge = judge_of(directory, dtype)
        if adapter:
            judge = Judge(directory, dtype)
            merge(judge.model, Path(adapter[1]))
        for job, (answer, _) in zip(*served, strict=True):
            for at, (request, tokens) in enumerate(zip(job, answer["tokens"], strict=True)):
                if tuple(request.get("adapter") or ()) != adapter:
                    continue
                error = judge.errors(request["prompt"], tokens, answer["logprobs"][at])
                if "sampling" in request:
                    assert tokens == request["sampling"]["extra_args"]["forced"]
                    errors.append(error)
                    continue
                own.append(error)
                gaps += [judge.gaps(request["prompt"], each[at]) for each in (answer["tokens"], *answer["again"])]
                others.append(float(judge.gaps(request["prompt"], answer["tokens"][at - 2]).mean()))
    return torch.cat(errors or own), gaps, sorted(others)[len(others) // 2]


def compare(name: str, ours: dict[str, Any], log: str, other: dict[str, Any], others: str) -> None:
    """With another engine of ours."""
    if name.startswith("drafts"):  # whose steps are vLLM's
        assert "prepared by vLLM" not in log
        assert ours["verified"] > ours["steps"] / 3 > ours["drafted"] == other["verified"] == 0
        assert ours["accepted"] > ours["draft"] / 20
        assert abs(ours["accepted"] / ours["draft"] - other["accepted"] / other["draft"]) < 0.1
    elif name == "caches moved":
        assert "External Cache Hit" in others
    else:
        assert (ours["tokens"], ours["logprobs"]) == (other["tokens"], other["logprobs"])
    if name.startswith("sampling"):
        assert ours["preempted"] == other["preempted"] > 0
        assert ("Asynchronous scheduling is enabled" in log) == (name == "sampling")
        assert "decode steps are prepared by vLLM" in others and "decode steps are prepared by vLLM" not in log


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("experts", MODELS)
def test_form(experts: str, name: str, running: Running) -> None:
    """No farther from float64 than vLLM's own; of greedy answers as many tokens are its best, but for four deviations.

    The judge sees an answer that is another request's.
    """
    form, errors = FORMS[name], dict[str, torch.Tensor]()
    if (experts, name) not in running:
        pytest.skip(f"needs {form.gpus} GPUs")
    directory, future = running[experts, name]
    found, figures = future.result(), dict[str, Any](experts=experts, form=name)
    (answer, log), *_ = found["ours"][1]
    assert all(OURS in said for _, said in found["ours"][1])
    assert {line: log.count(line) for line in form.said} == form.said
    assert IN_LOG.get(name, "") in log
    assert answer["again"] == [answer["tokens"]] * len(answer["again"])
    assert answer.get("logprobs_again", answer["logprobs"]) == answer["logprobs"]
    if "again" in found:
        compare(name, answer, log, *found["again"][1][0])
    if name.startswith("sampling"):
        return
    for who, served in found.items():
        errors[who], gaps, another = judged(directory, served, torch.float64 if form.experts is None else torch.float32)
        figures[who] = {
            "mean": float(errors[who].mean()), "99 %": float(errors[who].quantile(0.99)),
            "best": sum(int((gap == 0).sum()) for gap in gaps), "of": sum(map(len, gaps)),
            "largest mean gap": max(float(gap.mean()) for gap in gaps), "another's": another,
        }  # fmt: skip
    print(f"\nfigures {json.dumps(figures)}", flush=True)
    for who in errors.keys() - {"stock"}:
        assert figures[who]["mean"] < 0.06
        assert figures[who]["largest mean gap"] < ROUNDING < figures[who]["another's"] / 2
    if "stock" in found:
        farther = errors["ours"] - errors["stock"]
        assert float(farther.mean()) < 2 * float(farther.std()) / len(farther) ** 0.5
        assert figures["ours"]["best"] > figures["stock"]["best"] - 4 * figures["stock"]["best"] ** 0.5
