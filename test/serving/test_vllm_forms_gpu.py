"""vLLM on a Hopper GPU with our model: batch-invariant mode, sleep and wake, adapters; float64 is the measure."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from adapters import merge, write_adapter
from judge import Judge, slice_config, write_slice
from sampling import PROCESSORS, forced
from test_vllm_gpu import check, judged, pytestmark, requests, serve  # noqa: F401

from kimi_k2.config import KimiK2Config
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint

INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}


@pytest.mark.parametrize("name", ["kimi-k2-instruct-0905", "kimi-k2-thinking"], ids=["fp8", "int4"])
def test_a_request_alone_and_among_others(name: str, tmp_path: Path) -> None:
    """The same bits in parts of 512 beside decodes, and whole by itself; our decode steps run in both."""
    directory, job = tmp_path / "model", requests()
    # The router of batch-invariant mode takes the real model's experts.
    write_synthetic_checkpoint(directory, slice_config(name).model_copy(update={"n_routed_experts": 384}), seed=3)
    judge = Judge(directory)
    job[0]["prompt"], job[1]["prompt"] = job[1]["prompt"][:513], job[1]["prompt"][:1]  # the first: 512, then one
    among = serve(directory, job, tmp_path, INVARIANT)
    alone = [{**one, "arrival": 90 * number} for number, one in enumerate(job)]
    by_itself = serve(directory, alone, tmp_path, INVARIANT, max_num_batched_tokens=2048)
    assert "follow each other on the GPU" in among["log"]
    assert "no prefix caching" in serve(directory, job[:1], tmp_path, INVARIANT, enable_prefix_caching=True)["log"]
    same = [one == other for one, other in zip(among["logprobs"], by_itself["logprobs"], strict=True)]
    print(f"the same bits: {sum(same)} of {len(same)} requests")
    check(judge, job, among)
    assert among["tokens"] == by_itself["tokens"]
    assert all(same)


def test_sleep_and_wake(judged: tuple[Path, Judge], tmp_path: Path) -> None:  # noqa: F811
    """Weights on the host, then none and read again, then as at first: the same bits each time, graphs kept."""
    (directory, judge), job = judged, [{**one, "arrival": 0} for one in requests()[:1]]
    naps = [(way, "") for way in ("sleep", "sleep2", "sleep")]
    answer = serve(directory, job, tmp_path, {}, enable_sleep_mode=True, swaps=naps)
    print(*(line for line in answer["log"].splitlines() if "Sleep mode freed" in line), sep="\n")
    assert answer["again"] == [answer["tokens"]] * len(naps)
    assert answer["logprobs_again"] == answer["logprobs"]
    check_one(judge, job, answer)


def check_one(judge: Judge, job: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    for one, tokens, said in zip(job, answer["tokens"], answer["logprobs"], strict=True):
        assert float(judge.errors(one["prompt"], tokens, said).mean()) < 0.06


def with_adapters(directory: Path, out: Path, *, experts: bool) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Requests, every third without an adapter, made to answer with drawn tokens; and these."""
    with torch.device("meta"):
        model = KimiK2ForCausalLM(KimiK2Config.from_pretrained(directory), dtype=torch.bfloat16)
    both = [write_adapter(model, out / f"adapter{rank}", rank, rank, experts=experts) for rank in (16, 8)]
    draw, job = Random(9), requests()
    wanted = [[draw.randrange(10, 700) for _ in range(one["new_tokens"])] for one in job]
    for number, one in enumerate(job):
        one["sampling"] = forced(wanted[number])
        if number % 3:
            one["adapter"] = [number % 3, str(both[number % 3 - 1])]
    return job, wanted


def errors(directory: Path, job: list[dict[str, Any]], answers: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Of each engine's log-probabilities, against the plain model in float64 with each request's adapter merged."""
    found: list[list[torch.Tensor]] = [[] for _ in answers]
    for adapter in {tuple(one.get("adapter") or ()) for one in job}:
        judge = Judge(directory, torch.float64)
        if adapter:
            merge(judge.model, Path(adapter[1]))
        for number, one in enumerate(job):
            if tuple(one.get("adapter") or ()) == adapter:
                for made, answer in zip(found, answers, strict=True):
                    made.append(judge.errors(one["prompt"], answer["tokens"][number], answer["logprobs"][number]))
    return [torch.cat(made) for made in found]


TWO = pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))


@pytest.mark.parametrize("experts", [False, True], ids=["attention", "experts"])
@pytest.mark.parametrize("ranks", [1, TWO], ids=["one", "two"])
@pytest.mark.parametrize("name", ["kimi-k2-instruct-0905", "kimi-k2-thinking"], ids=["fp8", "int4"])
def test_adapters_no_farther_from_float64_than_vllms(name: str, ranks: int, experts: bool, tmp_path: Path) -> None:
    """Two adapters and none in one batch; without routed experts in CUDA graphs. Stock where it serves that at all."""
    directory = tmp_path / "model"
    write_slice(directory, name, ranks)
    job, wanted = with_adapters(directory, tmp_path, experts=experts)
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "tensor_parallel_size": ranks}
    if not experts:
        names = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        options["lora_target_modules"] = [*names, "fused_qkv_a_proj", "gate_up_proj"]
    answers = []
    for who in ("ours", "stock"):
        (tmp_path / who).mkdir()
        try:
            made = serve(directory, job, tmp_path / who, {}, who == "stock", logits_processors=PROCESSORS, **options)
        except AssertionError as error:
            assert who == "stock"
            print("stock does not serve this:", str(error)[-700:])
            continue
        assert made["tokens"] == wanted
        answers.append(made)
    found = errors(directory, job, answers)
    for who, one in zip(("ours", "stock"), found, strict=False):
        print(f"{who}: error mean {one.mean():.4f}, median {one.median():.4f}, 99 % {one.quantile(0.99):.3f}")
    base = [{**one, "adapter": None} for one in job]
    print(f"against the model without adapters: {errors(directory, base, answers[:1])[0].mean():.4f}")
    assert float(found[0].mean()) < 0.06
    if len(found) > 1:
        farther = found[0] - found[1]
        assert float(farther.mean()) < 2 * float(farther.std()) / len(farther) ** 0.5
