"""Steps with prompts that two ranks replay: the plain model's hidden states, and graphs on both ranks or on none."""

from __future__ import annotations

import sys
from pathlib import Path

import needs
import pytest
import torch
from processes import run_together

from kimi_k2.sharding.layout import STORED, Layout
from kimi_k2.sharding.presharder import Presharder

needs.engine("vllm")

WORKER = Path(__file__).with_name("prompt_graphs_worker.py")


@pytest.mark.parametrize(("moe_tp", "moe_ep"), [(2, 1), (1, 2)], ids=["cut", "shared out"])
def test_two_ranks(moe_tp: int, moe_ep: int, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source, converted, out = checkpoints["thinking"], tmp_path / "ranks", tmp_path / "out"
    Presharder(source, converted, Layout(moe_tp, moe_ep, target="cuda", experts=STORED)).run()
    run_together([[sys.executable, WORKER, rank, source, converted, moe_tp, moe_ep, out] for rank in range(2)])
    first, second = (torch.load(f"{out}-{rank}") for rank in range(2))
    reasons = [[reason for reason, _ in one["refused"]] for one in (first, second)]
    assert reasons[0] == ["48 tokens: another rank cannot"] * 2
    assert reasons[1] == ["48 tokens: cannot be recorded", "48 tokens: does not take it"]
    for one in (first, second):  # sums are made where all ranks are, none in what one of them may not reach
        for _, sums in one["refused"]:
            assert [shape[0] for shape in sums] == [64, 48, 32, 16]
        assert one["replays"] == 5
        assert max(one["errors"]) < 2e-5
