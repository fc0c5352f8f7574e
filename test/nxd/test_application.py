"""NeuronApplication in CPU mode: generation over the loaded NxDI model against the plain model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import bf16_preset, launch, plain_model

from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams

WORKER = Path(__file__).with_name("application_worker.py")
PROMPTS = [[5, 17, 300, 41, 8, 99], [7, 7, 12], [400, 3, 2, 1, 9, 9, 9, 31, 55]]
STEPS = 14


def run(checkpoint: Path, tmp_path: Path, calls: list[dict[str, Any]], ranks: int = 1, **job: Any) -> list[Any]:
    """Answers of application_worker.py on as many processes as ranks."""
    deployment = {"length": 48, "batch_size": 3, **job.pop("deployment", {})}
    made = {"checkpoint": checkpoint, "preset": "trn2-tp32-ep2", "deployment": deployment, "calls": calls, **job}
    answers: list[Any] = launch({**made, "neuron_config": {"tp_degree": ranks}}, tmp_path, worker=WORKER)
    return answers


@torch.inference_mode()
def expected(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of the plain model."""
    return generate(plain_model(checkpoint), prompts, SamplingParams(STEPS, ignore_eos=True)).token_ids


@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_tokens_are_the_plain_models(checkpoints: dict[str, Path], tmp_path: Path, ranks: int) -> None:
    """Ragged batches, fewer prompts than the batch, one generation after another; two ranks are the preset's EP=2."""
    greedy = {"max_new_tokens": STEPS}
    calls: list[dict[str, Any]] = [
        {"prompts": PROMPTS, "params": greedy},
        {"prompts": PROMPTS[1:2], "params": greedy},
    ]
    if environment.adapter_runs():
        calls.append({"prompts": PROMPTS, "adapter": STEPS})
    together, alone, *by_nxdi = run(checkpoints["fp8"], tmp_path, calls, ranks)
    assert together == expected(checkpoints["fp8"], PROMPTS)
    assert by_nxdi == [together] * environment.adapter_runs()  # HuggingFaceGenerationAdapter
    assert alone == expected(checkpoints["fp8"], PROMPTS[1:2])


def test_a_preset_with_flash_decoding(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The 128k preset's cache lies on two ranks, whose number does not divide the length that was asked for."""
    made = {"preset": bf16_preset("trn2-tp64-ep1-128k", tmp_path), "deployment": {"length": 47}}
    calls: list[dict[str, Any]] = [{"prompts": PROMPTS, "params": {"max_new_tokens": STEPS}}]
    (tokens,) = run(checkpoints["bf16"], tmp_path, calls, 2, **made)
    assert tokens == expected(checkpoints["bf16"], PROMPTS)


def test_on_device_sampling(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Greedy by temperature 0 and by top_k 1; a draw chooses among the plain model's first top_k tokens."""
    draw: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.7, "top_k": 3}
    greedy: dict[str, Any] = {"max_new_tokens": STEPS}
    calls: list[dict[str, Any]] = [
        {"prompts": PROMPTS, "params": greedy},
        {"prompts": PROMPTS, "params": {**greedy, "temperature": 1.0, "top_k": 1}},
        *[{"prompts": PROMPTS, "params": draw}] * 8,
    ]
    sampling: dict[str, Any] = {"deployment": {"sampling": {"dynamic": True}}}
    greedy_tokens, first_of_one, *drawn = run(checkpoints["fp8"], tmp_path, calls, **sampling)
    assert greedy_tokens == first_of_one == expected(checkpoints["fp8"], PROMPTS)
    model = plain_model(checkpoints["fp8"])
    for row, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            likely = model(torch.tensor([prompt]))[0, -1].topk(3).indices.tolist()
        chosen = {tokens[row][0] for tokens in drawn}
        assert chosen <= set(likely)
    assert len({str(tokens) for tokens in drawn}) > 1  # drawn, not greedy


def test_what_cannot_be_run_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    few = {"max_new_tokens": 4}
    calls: list[dict[str, Any]] = [
        {"prompts": [*PROMPTS, [1]], "params": few},
        {"prompts": [[1] * 60], "params": few},
        {"prompts": [[1] * 40], "params": {"max_new_tokens": 9}},
        {"prompts": [[]], "params": few},
        {"prompts": PROMPTS, "params": {**few, "temperature": 0.5}},
    ]
    fixed: dict[str, Any] = {"deployment": {"sampling": {"do_sample": False}}}
    answers = run(checkpoints["bf16"], tmp_path, calls, **fixed)
    for answer, words in zip(
        answers,
        ("batch size of 3", "exceed the 48 tokens", "exceed the 48 tokens", "at least one token", "greedy"),
        strict=True,
    ):
        assert words in answer
