"""The kernel benchmark's table: which operations it finds, and what it says of a row."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from kimi_k2.bench.kernels import table
from kimi_k2.bench.kernels.harness import Row, in_turns
from kimi_k2.errors import KernelError


def test_operations_are_found() -> None:
    assert {"gate", "router"} <= set(table.operations())
    assert "harness" not in table.operations()


def test_a_row_says_rates_share_and_verdict() -> None:
    # 2 GB and 4 TFLOP in a millisecond: 2000 GB/s and 4000 TFLOP/s.
    row = Row("gate", "T=1", "ours", 1000.0, 2e9, 4e12, target=999.0)
    line = table.describe(row, bandwidth=4000.0, matrix_rate=16000.0)
    for part in ("1000.00 us", "2000 GB/s", "4000.0 TFLOP/s", "50.0%", "target 999: not met"):
        assert part in line
    assert "target 2: met" in table.describe(Row("gate", "T=1", "ours", 1.5, 1e3, target=2.0), 4000.0, 700.0)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="no CUDA device"):
        table.run([], True, None, print)


def test_a_peers_row_tells_our_time_as_a_part_of_its_own() -> None:
    peer = Row("gate", "T=1", "peer", 2.0, 1e3)
    assert table.describe(peer, 4000.0, 700.0, 1.5).endswith("ours 0.750 of it")
    assert "of it" not in table.describe(peer, 4000.0, 700.0)


def test_it_says_which_peers_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for name, value in (("is_available", True), ("get_device_name", "GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(table, "quick_captures", lambda: None)
    monkeypatch.setattr(table, "read_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(table, "matmul_rate", lambda: 700.0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("kimi_k2.bench.kernels.gate.rows", lambda with_peers: [Row("gate", "T=1", "ours", 1.0, 1e3)])
    table.run(["gate"], True, None, said.append)
    assert said[1] == "not installed: vLLM, so no row of FlashAttention 3, FlashMLA or DeepGEMM" and len(said) == 3
    table.run(["gate"], False, None, said.append)
    assert len(said) == 5


def test_the_last_lines_tell_where_a_peer_is_faster() -> None:
    rows = [
        Row("gate", case, who, time, 1e3)
        for case, times in {"T=1": (1.0, 2.0, 4.0), "T=2": (3.3, 4.0, 3.0), "T=4": (5.0,)}.items()
        for who, time in zip(("ours", "peer", "other"), times, strict=False)
    ]
    assert list(table.slower(rows)) == [
        "gate, ours: 2 cases beside peers, of the best's time median 0.800, largest 1.100, above 1.05 in 1",
        "  1.100 T=2",
    ]


def test_a_slower_case_is_timed_in_turns_that_begin_with_others() -> None:
    asked: list[str] = []
    times = {"ours": iter([3.0, 1.0, 1.1]), "ours, rounded": iter([0.1] * 3), "peer": iter([1.0, 1.0, 9.0])}

    def timer(name: str) -> float:
        asked.append(name)
        return next(times[name])

    assert in_turns({name: partial(timer, name) for name in times}) == {"ours": 1.1, "ours, rounded": 0.1, "peer": 1.0}
    assert asked == [*times, "ours, rounded", "peer", "ours", "peer", "ours", "ours, rounded"]
    asked.clear()
    once = {"ours": iter([1.05]), "peer": iter([1.0]), "failed": iter([math.inf])}
    times.update(once)
    assert in_turns({name: partial(timer, name) for name in once})["ours"] == 1.05 and asked == list(once)
