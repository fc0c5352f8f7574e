"""The kernel benchmark's table: which operations it finds, and what it says of a row."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from typer.testing import CliRunner

from kimi_k2.kernels.bench.row import Row

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_kernels.py"


def script():
    spec = importlib.util.spec_from_file_location("benchmark_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_operations_are_found():
    assert {"gate", "router"} <= set(script().operations())
    assert "harness" not in script().operations()


def test_a_row_says_rates_share_and_verdict():
    # 2 GB and 4 TFLOP in a millisecond: 2000 GB/s and 4000 TFLOP/s.
    row = Row("gate", "T=1", "ours", 1000.0, 2e9, 4e12, target=999.0)
    line = script().describe(row, bandwidth=4000.0, matrix_rate=16000.0)
    for part in ("1000.00 us", "2000 GB/s", "4000.0 TFLOP/s", "50.0%", "target 999: not met"):
        assert part in line
    assert "target 2: met" in script().describe(Row("gate", "T=1", "ours", 1.5, 1e3, target=2.0), 4000.0, 700.0)


def test_without_a_gpu_it_says_so(monkeypatch):
    import typer

    module = script()
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    app = typer.Typer()
    app.command()(module.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output
