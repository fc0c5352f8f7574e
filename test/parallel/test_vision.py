"""The tower on two and three ranks: the same bits as on one, also with fewer images than ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import python
from processes import run_together

from kimi_k2.parallel.vision import dealt

WORKER = Path(__file__).with_name("worker.py")


def encode(source: Path, work: Path, where: str, *groups: int) -> list[list[Any]]:
    """What each rank of groups of so many ranks saved; all run at once."""
    outs = [[work / f"{ranks}-{rank}.pt" for rank in range(ranks)] for ranks in groups]
    commands = [
        [*python(), WORKER, "encode", rank, len(group), source, work / f"rendezvous-{len(group)}", out, where]
        for group in outs
        for rank, out in enumerate(group)
    ]
    run_together(commands, timeout=300)
    return [[torch.load(out) for out in group] for group in outs]


def compare(source: Path, work: Path, where: str, ranks: int) -> None:
    ((expected, _),), found = encode(source, work, where, 1, ranks)
    for results, _ in found:
        for result, other in zip(results, expected, strict=True):
            assert len(result) == len(other)
            assert all(torch.equal(a, b) for a, b in zip(result, other, strict=True))
    # Each image was run by one rank, and 16 of them by more than one.
    assert [sum(packs[place] for _, packs in found) for place in range(3)] == [1, 3, 16]
    assert sum(packs[2] > 0 for _, packs in found) == ranks


def test_two_ranks_equal_one_bit_for_bit(k25_int4: Path, tmp_path: Path) -> None:
    compare(k25_int4, tmp_path, "cpu:float32", 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one_bit_for_bit(k25_int4: Path, tmp_path: Path) -> None:
    compare(k25_int4, tmp_path, "cuda:bfloat16", 2)


def test_packs_are_dealt_by_cost() -> None:
    assert dealt([5, 1, 9, 1, 2], 2) == [1, 1, 0, 1, 1]
    assert dealt([7], 4) == [0]
    assert dealt([], 4) == []
    assert dealt([3, 3, 3, 3], 4) == [0, 1, 2, 3]
