"""Two ranks with our model in vLLM: what they replay, on both or on neither; experts that vLLM moves between them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import needs
import pytest
import torch
from plain_tokens import expected
from processes import run_together
from vllm_engine import requests, serve

from kimi_k2.sharding.layout import STORED, Layout
from kimi_k2.sharding.presharder import Presharder

needs.engine("vllm")

HERE = Path(__file__).parent
REFUSALS = {"nothing": 0, "the trial": 1, "the second record": 3}


@pytest.mark.parametrize(("name", "redundant"), [("thinking", 0), ("wide", 2)])
def test_experts_moved(name: str, redundant: int, checkpoints: dict[str, Path], wide: Path, tmp_path: Path) -> None:
    """By its own balancer: layers compute what they did. INT4; FP8 blocks, some experts held twice."""
    given = {**checkpoints, "wide": wide}[name], tmp_path / "meeting", redundant
    run_together([[sys.executable, HERE / "balance_worker.py", rank, *given] for rank in range(2)], timeout=300)


@pytest.mark.parametrize(("moe_tp", "moe_ep"), [(2, 1), (1, 2)], ids=["cut", "shared out"])
def test_steps_with_prompts(moe_tp: int, moe_ep: int, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Replayed: the plain model's hidden states."""
    source, converted, out = checkpoints["thinking"], tmp_path / "ranks", tmp_path / "out"
    Presharder(source, converted, Layout(moe_tp, moe_ep, target="cuda", experts=STORED)).run()
    given = source, converted, moe_tp, moe_ep, out
    run_together([[sys.executable, HERE / "prompt_graphs_worker.py", rank, *given] for rank in range(2)])
    first, second = (torch.load(f"{out}-{rank}") for rank in range(2))
    reasons = [[reason for reason, _ in one["refused"]] for one in (first, second)]
    assert reasons[0] == ["48 tokens: another rank cannot"] * 2
    assert reasons[1] == ["48 tokens: cannot be recorded", "48 tokens: does not take it"]
    for one in (first, second):  # sums are made where all ranks are, none in what one of them may not reach
        for _, sums in one["refused"]:
            assert [shape[0] for shape in sums] == [64, 48, 32, 16]
        assert one["replays"] == 5
        assert max(one["errors"]) < 2e-5


@pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="KIMI_K2_SLOW=1 starts two ranks for each")
@pytest.mark.parametrize("refused", REFUSALS)
def test_decode_steps(refused: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The second cannot run a step, in the trial before its graphs are recorded or in a record; CUDA has a stand-in."""
    job, run = requests(seed=4), REFUSALS[refused]
    answer, log = serve(
        checkpoints["thinking"], "float32", job, tmp_path, timeout=240, tensor_parallel_size=2,
        worker_extension_cls="refused_step.Extension", environment={"KIMI_K2_TEST_REFUSED": str(run)},
    )  # fmt: skip
    assert answer["tokens"] == expected(checkpoints["thinking"], "float32", job)
    said = [line.partition("prepared by vLLM: no graph of them: ")[2] for line in log.splitlines()]
    assert sorted(filter(None, said)) == (["another rank cannot", "refused by the second rank"] if run else [])
    for line in ("decode steps of up to 4 requests follow each other on the GPU: 3 sizes", "a decode step is replayed"):
        assert log.count(line) == (0 if run else 2)
