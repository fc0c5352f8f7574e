"""Prompts of two ranks replayed from graphs: the bits of the launches, and both ranks do the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import python
from processes import run_together

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.prompt_step import MAX_GRAPHS
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint

WORKER = Path(__file__).with_name("worker.py")
LONG = (224, 160)  # widths: that of which rank 1 makes no graph once it is asked to refuse; one that comes once
HALF = (112, 80)


def run_ranks(source: Path, work: Path, where: str, *layouts: tuple[int, int]) -> list[list[Any]]:
    """What each rank saved."""
    conversions = [work / f"{moe_tp}x{moe_ep}" for moe_tp, moe_ep in layouts]
    for converted, layout in zip(conversions, layouts, strict=True):
        Presharder(source, converted, Layout(*layout, target="cuda", experts="stored")).run()
    arguments = [source, work / "rendezvous", work / "told", where, *conversions]
    run_together([[*python(), WORKER, "read_prompts", rank, *arguments] for rank in range(2)])
    return [torch.load(work / f"told-{rank}") for rank in range(2)]


def check(first: Any, second: Any, refuse: int, once: int) -> None:
    """What became of the prompts without and with a refusal: the same on both ranks."""
    assert first == second
    size_refused, made = (refuse, refuse, False), []
    for told, refused, warned in first:
        steps = [(size, size in before, size in held) for (_, before), (size, held) in pairwise([((), []), *told])]
        assert sum(before for _, before, _ in steps) > 3  # replays
        made.append([size for size, before, held in steps if held and not before])
        assert len(told[-1][1]) == MAX_GRAPHS and warned == len(refused)
    assert len(made[0]) > len(set(made[0])) > MAX_GRAPHS  # one was given up, and captured again
    assert size_refused in made[0] and (once, once, False) not in made[0]  # came once
    # One rank fails: both give that size up, and do alike with the others.
    assert [refused for _, refused, _ in first] == [set(), {size_refused}] and size_refused not in made[1]


def test_ranks_decide_alike(wide: Path, tmp_path: Path) -> None:
    first, second = run_ranks(wide, tmp_path, "cpu", (2, 1))
    check(first, second, *HALF)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_replays_on_gpus(for_gpus: KimiK2Config, tmp_path: Path) -> None:
    """Sums pushed into peers' memory and by NCCL; then the ranks part, which NCCL delays until no graph is left."""
    write_synthetic_checkpoint(tmp_path / "source", for_gpus)
    first, second = run_ranks(tmp_path / "source", tmp_path, "cuda", (2, 1), (1, 2))
    check(first[:2], second[:2], *LONG)
    check(first[2:], second[2:], *LONG)
