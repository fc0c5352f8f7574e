"""The kernel benchmark's table: which operations it knows, and what it says of a row."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from kimi_k2.bench.kernels import harness, report, table
from kimi_k2.bench.kernels.gate import plain_gate, random_logits
from kimi_k2.bench.kernels.harness import Case, Row, in_turns
from kimi_k2.errors import KernelError
from kimi_k2.ops.experts import noaux_tc_gate


def test_a_row_says_rates_and_share() -> None:
    # 2 GB and 4 TFLOP in a millisecond: 2000 GB/s and 4000 TFLOP/s.
    row = Row("gate", "T=1", "ours", 1000.0, 2e9, 4e12)
    line = report.describe(row, bandwidth=4000.0, matrix_rate=16000.0)
    for part in ("1000.00 us", "2000 GB/s", "4000.0 TFLOP/s", "50.0%"):
        assert part in line


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="no CUDA device"):
        table.run([], True, None, print)


def test_a_peers_row_tells_our_time_as_a_part_of_its_own() -> None:
    peer = Row("gate", "T=1", "peer", 2.0, 1e3)
    assert report.describe(peer, 4000.0, 700.0, 1.5).endswith("ours 0.750 of it")
    assert "of it" not in report.describe(peer, 4000.0, 700.0)


def test_it_says_which_peers_are_not_installed_and_leaves_out_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for name, value in (("is_available", True), ("get_device_name", "GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(report, "quick_captures", lambda: None)
    monkeypatch.setattr(report, "read_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(report, "matmul_rate", lambda: 700.0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(harness, "graph_times", lambda calls, replays: [calls[0]()])
    case = Case("gate", "T=1", {"ours": [lambda: 1.0], "peer": [partial(fail, RuntimeError())]}, 1e3)
    monkeypatch.setitem(table.OPERATIONS, "gate", lambda with_peers: iter([case]))
    table.run(["gate"], True, tmp_path / "rows.json", said.append)
    assert said[1] == "not installed: vLLM, so no row of FlashAttention 3, FlashMLA or DeepGEMM" and len(said) == 4
    assert said[3] == "no row of peer: RuntimeError: "
    stored = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["implementation"], row["microseconds"]) for row in stored["rows"]] == [("ours", 1.0)]
    table.run(["gate"], False, None, said.append)
    assert len(said) == 7
    # Of the same kernels a case is timed once; one that has not ended is left out; of others all are timed anew.
    stored["begun"].append(["gate", "T=2"])
    for state, wanted in (("other", 1), (stored["kernels"], 1)):
        (tmp_path / "rows.json").write_text(json.dumps(stored | {"kernels": state}))
        said.clear()
        table.run(["gate"], False, tmp_path / "rows.json", said.append)
        assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == wanted
        assert (said[-1] == "left out, as a run ended in it: gate, T=2") == (state != "other")
    with pytest.raises(KernelError, match=r"only: drafts not among gate, linear, mla, mla_prefill, router, vision"):
        table.run(["drafts"], False, None, said.append)


def fail(error: Exception) -> None:
    raise error


def test_the_last_lines_tell_where_a_peer_is_faster() -> None:
    rows = [
        Row("gate", case, who, time, 1e3)
        for case, times in {"T=1": (1.0, 2.0, 4.0), "T=2": (3.3, 4.0, 3.0), "T=4": (5.0,)}.items()
        for who, time in zip(("ours", "peer", "other"), times, strict=False)
    ]
    assert list(report.slower(rows)) == [
        "gate, ours: 2 cases beside peers, of the best's time median 0.800, largest 1.100 (T=2), above 1.05 in 1",
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


def test_the_gate_that_torch_compile_is_given_is_the_same_operation() -> None:
    logits, bias = random_logits(50, 384, device="cpu")
    wanted = noaux_tc_gate(logits, bias, 8, routed_scaling_factor=2.827)
    got = plain_gate(logits, bias)
    assert torch.equal(got[0].long(), wanted[0])
    torch.testing.assert_close(got[1], wanted[1])
