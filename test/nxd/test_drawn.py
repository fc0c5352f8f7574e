"""Parallel layouts of configurations drawn at random, executed in float32, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import SLOW, run_executed

TOLERANCE = 2e-5


@pytest.mark.parametrize(("first", "count"), [(0, 2), pytest.param(2, 18, marks=SLOW)], ids=["two", "eighteen"])
def test_layouts(tmp_path: Path, first: int, count: int) -> None:
    worker, output = Path(__file__).with_name("drawn_worker.py"), tmp_path / "output.pt"
    run_executed([str(worker), str(first), str(count), str(output)], ranks=4, timeout=1200)
    for name, worst in torch.load(output):
        print(f"\n{worst:.1e} {name}")
        assert worst <= TOLERANCE, name
