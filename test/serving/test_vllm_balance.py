"""Experts that vLLM's own balancer moves between two ranks: layers compute what they did, wherever experts are."""

from __future__ import annotations

import sys
from pathlib import Path

import needs
import pytest
from processes import run_together

needs.engine("vllm")

WORKER = Path(__file__).with_name("balance_worker.py")


@pytest.mark.parametrize(("name", "redundant"), [("thinking", 0), ("wide", 2)])
def test_experts_moved(name: str, redundant: int, checkpoints: dict[str, Path], wide: Path, tmp_path: Path) -> None:
    """INT4; FP8 blocks, some experts held twice."""
    directory = {**checkpoints, "wide": wide}[name]
    given = directory, tmp_path / "meeting", redundant
    run_together([[sys.executable, WORKER, rank, *given] for rank in range(2)], timeout=300)
