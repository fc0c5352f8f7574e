"""vLLM with our model and adapters in one batch: of each request the tokens of the plain model with its own merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from adapters import merge, write_adapter
from plain_tokens import expected
from vllm_engine import OURS, requests, serve

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint

needs.engine("vllm")

OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def plain(directory: Path) -> KimiK2ForCausalLM:
    return KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32)


def expected_of_adapters(directory: Path, job: list[dict[str, Any]]) -> list[list[int]]:
    """Greedy tokens, each request alone."""
    wanted: dict[int, list[int]] = {}
    for adapter in {tuple(one.get("adapter") or ()) for one in job}:
        model = plain(directory)
        if adapter:
            merge(model, Path(adapter[1]))
        for number, one in enumerate(job):
            if tuple(one.get("adapter") or ()) == adapter:
                params = SamplingParams(one["new_tokens"], ignore_eos=True)
                wanted[number] = generate(model, [one["prompt"]], params).token_ids[0]
    return [wanted[number] for number in range(len(job))]


def with_adapters(directory: Path, out: Path, count: int = 10) -> list[dict[str, Any]]:
    """Every third request without one; the others' touch all that may be, or attention and shared experts alone."""
    model, job = plain(directory), requests(seed=31, count=count)
    both = [write_adapter(model, out / "all", 8, 1), write_adapter(model, out / "some", 4, 2, experts=False)]
    for number, one in enumerate(job):
        if number % 3:
            one["adapter"] = [number % 3, str(both[number % 3 - 1])]
    job[-1]["arrival"] += 200  # the last, which has none, by itself
    return job


@pytest.mark.parametrize("name", ["bf16", "thinking"])
def test_adapters_in_one_batch(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    job = with_adapters(checkpoints[name], tmp_path)
    answer, log = serve(checkpoints[name], "float32", job, tmp_path, **OPTIONS)
    assert OURS in log
    wanted = expected_of_adapters(checkpoints[name], job)
    assert answer["tokens"] == wanted
    base = expected(checkpoints[name], "float32", job)
    assert [one == other for one, other in zip(wanted, base, strict=True)] == [not number % 3 for number in range(10)]
    calls = {one: sum(entries.values()) for one, entries in answer["calls"].items()}
    assert calls["absorb_and_store"] > calls["query_and_entry"] > 0  # the fused one, where no token has an adapter


def test_weights_replaced_under_adapters(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Another checkpoint's by vLLM's reload: the adapters stay, on the new weights."""
    job = with_adapters(checkpoints["thinking"], tmp_path, count=4)[:3]
    other = tmp_path / "other"
    write_synthetic_checkpoint(other, KimiK2Config.from_pretrained(checkpoints["thinking"]), seed=66)
    swaps = [("reload", str(other))]
    answer, log = serve(checkpoints["thinking"], "float32", job, tmp_path, swaps=swaps, **OPTIONS)
    assert OURS in log
    assert answer["again"] == [expected_of_adapters(other, job)]
