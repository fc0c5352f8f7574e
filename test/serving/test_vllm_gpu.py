"""vLLM on a Hopper GPU with our model in it: float32's tokens but for rounding, whenever requests come."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from heads import write_following_head
from judge import ROUNDING, Judge, write_slice
from sampling import PROCESSORS, SAMPLING, forced
from torch import Tensor
from vllm_engine import serve as serve_any

from kimi_k2.drafts.config import Form

needs.engine("vllm")
pytestmark = needs.on_hoppers()

OPTIONS = {
    "max_model_len": 2048, "max_num_seqs": 12, "max_num_batched_tokens": 512, "enforce_eager": False,
    "kv_cache_memory_bytes": 300_000_000, "gpu_memory_utilization": 0.1, "enable_prefix_caching": False,
}  # fmt: skip
OURS = "kimi-k2: operations are ours ("
# vLLM's own model. DeepGEMM's warm-up would go through all sizes one by one, a second each.
STOCK = {"VLLM_PLUGINS": "kimi_k2_parsers", "VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def serve(
    directory: Path,
    job: list[dict[str, Any]],
    tmp_path: Path,
    environment: dict[str, str],
    stock: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """What vllm_requests.py answers: chunked prompts beside decodes, CUDA graphs, pages that are used again."""
    environment = {**environment, **(STOCK if stock else {})}
    answer, log = serve_any(directory, "bfloat16", job, tmp_path, environment=environment, **{**OPTIONS, **options})
    assert (OURS in log) != stock
    said = [line.partition("kimi-k2: ")[2] for line in log.splitlines()]
    print(next((line for line in said if "are replayed" in line), "no prompt graphs"))
    return answer | {"log": log}


def requests() -> list[dict[str, Any]]:
    """Prompts of 1 to 1,300 tokens, arriving 0 to 9 steps apart."""
    draw, arrival = random.Random(7), 0
    job: list[dict[str, Any]] = []
    for length in (1, 1300, 700, 2, 63, 64, 65, 300, 511, 512, 513, 1000, 17, 128, 900, 40):
        job.append({"prompt": [draw.randrange(10, 700) for _ in range(length)], "new_tokens": 64, "arrival": arrival})
        arrival += draw.randint(0, 9)
    return job


def distances(judge: Judge, job: list[dict[str, Any]], answer: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """How far below the judge's best token each chosen one is, and the errors of their log-probabilities; printed."""
    prompts: list[list[int]] = [one["prompt"] for one in job]
    gaps = [judge.gaps(*one) for one in zip(prompts, answer["tokens"], strict=True)]
    errors = torch.cat([judge.errors(*one) for one in zip(prompts, answer["tokens"], answer["logprobs"], strict=True)])
    best = sum(int((gap == 0).sum()) for gap in gaps)
    print(f"best {best} of {len(errors)}, error of log-probabilities mean {errors.mean():.4f}, 99 % "
          f"{errors.quantile(0.99):.3f}, largest {errors.max():.3f}")  # fmt: skip
    return gaps, errors


def check(judge: Judge, job: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """Every answer is float32's but for rounding, and the judge sees one that is another request's."""
    prompts: list[list[int]] = [one["prompt"] for one in job]
    tokens: list[list[int]] = answer["tokens"]
    gaps, errors = distances(judge, job, answer)
    assert max(float(gap.mean()) for gap in gaps) < ROUNDING
    assert float(errors.mean()) < 0.06
    others = [float(judge.gaps(*one).mean()) for one in zip(prompts, tokens[1:] + tokens[:1], strict=True)]
    assert sorted(others)[len(others) // 2] > 2 * ROUNDING


@pytest.fixture(scope="module", params=["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Judge]:
    directory = tmp_path_factory.mktemp("slice") / "model"
    write_slice(directory, request.param)
    return directory, Judge(directory)


@pytest.mark.parametrize("runner", ["0", "1"], ids=["v1", "v2"])
def test_as_far_from_float32_as_rounding(judged: tuple[Path, Judge], runner: str, tmp_path: Path) -> None:
    """With either of vLLM's runners."""
    (directory, judge), job = judged, requests()
    answer = serve(directory, job, tmp_path, {"VLLM_USE_V2_MODEL_RUNNER": runner})
    assert ("Using V2 Model Runner" in answer["log"]) == (runner == "1")
    check(judge, job, answer)


def test_no_farther_from_float64_than_vllms_own_model(judged: tuple[Path, Judge], tmp_path: Path) -> None:
    """Both say the log-probabilities of the same tokens, drawn beforehand.

    A few errors are a hundred times the median, where rounding has chosen another expert: ours may be larger in the
    mean by no more than twice the standard error that this leaves in the difference.
    """
    (directory, _), draw = judged, random.Random(9)
    wanted = [[draw.randrange(10, 700) for _ in range(one["new_tokens"])] for one in requests()]
    job = [{**one, "sampling": forced(tokens)} for one, tokens in zip(requests(), wanted, strict=True)]
    with ThreadPoolExecutor() as pool:  # both come up meanwhile
        running = []
        for name in ("ours", "stock"):
            (tmp_path / name).mkdir()
            made = tmp_path / name
            running.append(pool.submit(serve, directory, job, made, {}, name == "stock", logits_processors=PROCESSORS))
        judge = Judge(directory, torch.float64)
        answers = [one.result() for one in running]
    errors = []
    for name, answer in zip(("ours", "stock"), answers, strict=True):
        assert answer["tokens"] == wanted
        said = zip(job, wanted, answer["logprobs"], strict=True)
        errors.append(torch.cat([judge.errors(one["prompt"], *tokens) for one, *tokens in said]))
        mean, median, most = errors[-1].mean(), errors[-1].median(), errors[-1].quantile(0.99)
        print(f"{name}: error of log-probabilities mean {mean:.4f}, median {median:.4f}, 99 % {most:.3f}")
    farther = errors[0] - errors[1]
    uncertain = float(farther.std()) / len(farther) ** 0.5
    print(f"ours less stock: {farther.mean():.4f}, standard error {uncertain:.4f}")
    assert float(farther.mean()) < 2 * uncertain


@pytest.mark.parametrize("name", ["kimi-k2-instruct-0905", "kimi-k2-thinking"], ids=["fp8", "int4"])
def test_a_rank_of_sixteen(name: str, tmp_path: Path) -> None:
    """Its four heads are half of the fewest that the kernels take."""
    job = requests()
    write_slice(tmp_path / "model", name, of=16)
    check(Judge(tmp_path / "model"), job, serve(tmp_path / "model", job, tmp_path, {}))


@pytest.fixture(scope="module", params=["kimi-k2-instruct-0905", "kimi-k2-thinking"], ids=["fp8", "int4"])
def judged_for_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Judge]:
    directory = tmp_path_factory.mktemp("two") / "model"
    write_slice(directory, request.param, ranks=2)
    return directory, Judge(directory)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "one by one"])
def test_every_way_of_sampling(ahead: bool, judged: tuple[Path, Judge], tmp_path: Path) -> None:
    """Steps that carry on with a batch give the bits of those that vLLM prepares, of preempted requests too.

    With steps scheduled before the last one's tokens are known, and after. Every size has its graphs, so no padding
    differs.
    """
    job = [{**one, "sampling": SAMPLING[at % len(SAMPLING)]} for at, one in enumerate(requests())]
    sizes = {"cudagraph_capture_sizes": list(range(1, 13))}
    options: dict[str, Any] = {"compilation_config": sizes, "num_gpu_blocks_override": 34, "async_scheduling": ahead}
    made = []
    for switch in ("1", "0"):
        answer = serve(judged[0], job, tmp_path, {"KIMI_K2_VLLM_DECODE_GRAPHS": switch}, **options)
        assert ("Asynchronous scheduling is enabled" in answer["log"]) == ahead
        assert ("decode steps are prepared by vLLM" in answer["log"]) == (switch == "0")
        made.append(answer)
    ours, theirs = made
    followed = sum(ours["calls"]["next_step"].values())
    print(f"{followed} captured, {ours['preempted']} preempted, {ours['steps']} steps")
    assert (ours["tokens"], ours["logprobs"]) == (theirs["tokens"], theirs["logprobs"])
    assert ours["preempted"] == theirs["preempted"] > 0


@pytest.mark.parametrize(("form", "ahead"), [("llama", True), ("llama", False), ("mla", True)])
def test_drafts(form: Form, ahead: bool, judged: tuple[Path, Judge], tmp_path: Path) -> None:
    """Of a head that knows what often follows a token: verified and drafted in graphs of ours as in vLLM's steps."""
    (directory, judge), job = judged, requests()
    plain = serve(directory, job, tmp_path, {})
    write_following_head(tmp_path / "head", judge.model, plain["tokens"], form, intermediate_size=512)
    drafts = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"speculative_config": drafts, "async_scheduling": ahead}
    options["compilation_config"] = {"cudagraph_capture_sizes": list(range(4, 49, 4))}
    made = []
    for switch in ("1", "0"):
        answer = serve(directory, job, tmp_path, {"KIMI_K2_VLLM_DECODE_GRAPHS": switch}, **options)
        check(judge, job, answer)
        print(f"{answer['verified']} of {answer['steps']} steps ours, {answer['drafted']} passes launched, "
              f"{answer['accepted']} of {answer['draft']} accepted")  # fmt: skip
        made.append(answer)
    ours, theirs = made
    print(f"{sum(map(list.__eq__, ours['tokens'], theirs['tokens']))} of {len(job)} answers the same")
    assert "prepared by vLLM" not in ours["log"]
    assert ours["verified"] > ours["steps"] / 3
    assert ours["drafted"] == 0  # in graphs
    assert theirs["verified"] == 0
    assert ours["accepted"] > ours["draft"] / 20
    assert abs(ours["accepted"] / ours["draft"] - theirs["accepted"] / theirs["draft"]) < 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("experts", ["cut", "whole"])
def test_two_ranks(judged_for_two: tuple[Path, Judge], experts: str, tmp_path: Path) -> None:
    """Each holds half of the heads; half of each expert, or half of the experts. Steps with prompts are replayed."""
    (directory, judge), job = judged_for_two, requests()
    answer = serve(directory, job, tmp_path, {}, tensor_parallel_size=2, enable_expert_parallel=experts == "whole")
    assert answer["log"].count("are replayed") == 2
    check(judge, job, answer)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("judged_for_two", ["kimi-k2-instruct-0905"], ids=["fp8"], indirect=True)
def test_drafts_of_two_ranks(judged_for_two: tuple[Path, Judge], tmp_path: Path) -> None:
    """Verified in graphs of ours; the head, whose sums are vLLM's, runs as vLLM has it."""
    (directory, judge), job = judged_for_two, requests()
    plain = serve(directory, job, tmp_path, {}, tensor_parallel_size=2)
    write_following_head(tmp_path / "head", judge.model, plain["tokens"], intermediate_size=1024)
    drafts = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    answer = serve(directory, job, tmp_path, {}, tensor_parallel_size=2, speculative_config=drafts)
    assert answer["log"].count("passes of the drafter are prepared by vLLM: a head of several ranks") == 2
    assert answer["log"].count("decode steps of up to") == 2
    assert answer["accepted"] > answer["draft"] / 20
    check(judge, job, answer)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("judged_for_two", ["kimi-k2-instruct-0905"], ids=["fp8"], indirect=True)
def test_a_rank_that_cannot_capture(judged_for_two: tuple[Path, Judge], tmp_path: Path) -> None:
    """Steps with prompts are launched one by one on both ranks."""
    (directory, judge), job = judged_for_two, requests()
    answer = serve(directory, job, tmp_path, {}, tensor_parallel_size=2, worker_extension_cls="refusing_rank.Extension")
    said = [line.partition("no graph of them: ")[2] for line in answer["log"].splitlines()]
    assert sorted(filter(None, said)) == ["384 tokens: another rank cannot", "384 tokens: refused by the second rank"]
    assert "are replayed" not in answer["log"]
    check(judge, job, answer)
