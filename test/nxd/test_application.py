"""Generation over the loaded NxDI model, by NeuronApplication and by NxDI's own adapter, against the plain model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from cases import Case, Stored, job
from generations import assisted, by_adapter, generations
from harness import launch, plain_model

from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams

PROMPTS = [[5, 17, 300, 41, 8, 99], [7, 7, 12], [400, 3, 2, 1, 9, 9, 9, 31, 55]]
STEPS = 14
GREEDY: dict[str, Any] = {"max_new_tokens": STEPS}
DRAWN = [(1, 1.0, 1.0), (5, 0.9, 0.7), (100, 0.8, 1.3), (20, 0.5, 1.0)]  # top_k, top_p, temperature
MOST = 64  # tokens that the graph draws from


@pytest.fixture
def adapter() -> None:
    if not environment.adapter_runs():
        pytest.skip("HuggingFaceGenerationAdapter of NxDI 0.8 reads a name that it never sets")


def run(checkpoint: Path, calls: list[dict[str, Any]], ranks: int = 1, way: str = "CPU mode", **more: Any) -> list[Any]:
    """Replies, or messages, of the preset's application."""
    deployment = {"length": 48, "batch_size": 3}
    asked = {"checkpoint": checkpoint, "preset": "trn2-tp32-ep2", "deployment": deployment, "ranks": ranks, **more}
    found = launch(generations, asked, calls, ranks=ranks, way=way)
    return [reply for answer in found for reply in (answer["replies"], answer.get("adapted")) if reply is not None]


@torch.inference_mode()
def expected(checkpoint: Path, prompts: list[list[int]], steps: int = STEPS) -> list[list[int]]:
    """Greedy tokens of the plain model."""
    return generate(plain_model(checkpoint), prompts, SamplingParams(steps, ignore_eos=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_tokens_are_the_plain_models(fp8: Path, ranks: int) -> None:
    """Ragged batches, fewer prompts than the batch, one generation after another; two ranks are the preset's EP=2."""
    calls: list[dict[str, Any]] = [
        {"prompts": PROMPTS[1:2], "params": GREEDY},
        {"prompts": PROMPTS, "params": GREEDY, "adapter": True},
    ]
    alone, together, *by_nxdi = run(fp8, calls, ranks)
    assert together == expected(fp8, PROMPTS)
    assert by_nxdi == [together] * environment.adapter_runs()
    assert alone == expected(fp8, PROMPTS[1:2])


def test_on_device_sampling(fp8: Path) -> None:
    """Greedy by temperature 0 and by top_k 1; a draw chooses among the plain model's first top_k tokens."""
    draw: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.7, "top_k": 3}
    calls: list[dict[str, Any]] = [
        {"prompts": PROMPTS, "params": GREEDY},
        {"prompts": PROMPTS, "params": {**GREEDY, "temperature": 1.0, "top_k": 1}},
        {"prompts": PROMPTS, "params": draw, "times": 8},
    ]
    greedy, first_of_one, drawn = run(fp8, calls, sampling={"dynamic": True})
    assert greedy == first_of_one == expected(fp8, PROMPTS)
    model = plain_model(fp8)
    for row, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            likely = model(torch.tensor([prompt]))[0, -1].topk(3).indices.tolist()
        assert {tokens[0] for tokens in drawn[row :: len(PROMPTS)]} <= set(likely)
    assert len({str(drawn[at : at + 3]) for at in range(0, 24, 3)}) > 1  # drawn, not greedy


def test_what_cannot_be_run_is_refused(bf16: Path) -> None:
    few: dict[str, Any] = {"max_new_tokens": 4}
    refused: dict[str, Any] = {
        "batch size of 3": ([*PROMPTS, [1]], few),
        "exceed the 48 tokens": ([[1] * 60], few),
        "9 more|exceed the 48 tokens": ([[1] * 40], {"max_new_tokens": 9}),
        "at least one token": ([[]], few),
        "greedy": (PROMPTS, {**few, "temperature": 0.5}),
    }
    calls = [{"prompts": prompts, "params": params} for prompts, params in refused.values()]
    for words, answer in zip(refused, run(bf16, calls, sampling={"do_sample": False}), strict=True):
        assert words.rpartition("|")[2] in answer


@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize(("draft", "ranks"), [("target", 1), ("stranger", 2)])
def test_assisted_decoding_is_greedy(stored: Stored, draft: str, ranks: int) -> None:
    """A draft that is the target is always right, and saves steps; a stranger is nearly always wrong."""
    width, steps = 4, 20
    target = stored(num_hidden_layers=2)
    other = target if draft == "target" else stored(num_hidden_layers=2, seed=1)
    layout = {1: "TP1", 2: "TP2"}[ranks]
    one, two = (
        job(Case(layout, options, batch=1), path)
        for path, options in ((target, {"speculation_length": width}), (other, {}))
    )
    found, took = launch(assisted, one, two, PROMPTS[0], steps, ranks=ranks)
    # NxDI stops where fewer tokens are left than a step takes.
    assert steps - width < len(found) <= steps
    assert found == expected(target, PROMPTS[:1], steps)[0][: len(found)]
    print(f"\n{len(found)} tokens in {took} steps behind the prompt")
    assert (took <= -(-steps // width)) == (draft == "target")


def middle(logits: torch.Tensor, top_k: int, top_p: float, temperature: float) -> int:
    """Top-k, temperature, then the token at half of the probability; top-p as NxDI has it, without the last token."""
    values, tokens = logits.topk(min(top_k, MOST))
    weights = (values / temperature).softmax(-1)
    kept = weights.cumsum(-1) <= max(top_p, float(weights[0]))
    kept[0] = True
    summed = weights.masked_fill(~kept, 0.0).cumsum(-1)
    return int(tokens[int((summed / summed[-1] < 0.5).sum())])


@torch.inference_mode()
def test_executed_sampling(fp8: Path) -> None:
    """NxDI's `deterministic` takes the middle of the distribution in place of a random number."""
    sampling = {"do_sample": True, "dynamic": True, "global_topk": MOST}
    # Without the SDK's own top-k kernel, which is not Python.
    more = {"on_device_sampling_config": {**sampling, "deterministic": True, "top_k_kernel_enabled": False}}
    calls = [
        {"prompts": PROMPTS[:1], "params": {"max_new_tokens": 2, "top_k": top_k, "top_p": top_p, "temperature": heat}}
        for top_k, top_p, heat in DRAWN
    ]
    replies = run(fp8, calls, ranks=2, way="executed", sampling=sampling, overrides=more)
    model = plain_model(fp8)
    for (reply,), params in zip(replies, DRAWN, strict=True):
        for at, token in enumerate(reply):
            assert token == middle(model(torch.tensor([PROMPTS[0] + reply[:at]]))[0, -1], *params)
    assert len({token for (reply,) in replies for token in reply}) > 3


@pytest.mark.usefixtures("adapter")
def test_executed_asynchronous_generation(stored: Stored) -> None:
    checkpoint = stored(num_hidden_layers=2)
    options = {"on_device_sampling_config": {"top_k_kernel_enabled": False}, "async_mode": True}
    asked = job(Case("TP1", {**options, "disable_argmax_kernel": True}, batch=1), checkpoint)
    found = launch(by_adapter, asked, PROMPTS[:1], STEPS, way="executed")
    assert found == expected(checkpoint, PROMPTS[:1])
