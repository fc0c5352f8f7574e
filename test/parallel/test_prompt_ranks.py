"""Prompts of two ranks replayed from graphs: the bits of the launches, and both ranks do the same."""

from __future__ import annotations

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
    """Of each rank, what became of the prompts without and with a refusal."""
    assert first[0] == second[0]
    size_refused = refuse, refuse, False
    told, held, refused, warned = first[0]
    assert not refused
    assert not warned
    assert len(held) == MAX_GRAPHS
    captured = [size for word, size in told if word == "capture"]
    assert len(captured) > len(set(captured)) > MAX_GRAPHS  # one was given up, and captured again
    assert size_refused in captured
    assert (once, once, False) not in captured  # came once
    assert sum(word == "replay" for word, _ in told) > 3
    # One rank fails: both give that size up, and do alike with the others.
    for rank, word in ((first, "capture"), (second, "refusal")):
        told, held, refused, warned = rank[1]
        assert refused == {size_refused}
        assert warned == 1
        assert [what for what, size in told if size == size_refused] == [word]
        assert held == first[1][1]
        assert [one for one in told if one[1] != size_refused] == [one for one in first[1][0] if one[1] != size_refused]


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
