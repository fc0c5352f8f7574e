"""One decode layer at Kimi-K2's width, BF16 with FP8 experts, on all 64 ranks of TP32/EP2, one graph at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from harness import SLOW, run_executed

LIMIT = 1e-2


@SLOW
def test_every_rank_in_turn(tmp_path: Path) -> None:
    """Relative L2 to float64 behind each module; about 3 GB and some minutes."""
    output = tmp_path / "output.pt"
    run_executed([str(Path(__file__).with_name("real_width_worker.py")), str(output)], ranks=1, timeout=1800)
    for name, error in torch.load(output).items():
        print(f"\n{name}: relative L2 {error:.1e}")
        assert error <= LIMIT, name
