"""Result files that are no result files, comparison of sweeps, and reports that need nothing from outside."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import kimi

from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.render import HEADER, Ratio, compare, differing, overall, write_reports
from kimi_k2.bench.results import Settings, load_results
from kimi_k2.bench.sweep import run_sweep
from kimi_k2.files import Json

SETTINGS = Settings(model="tiny", backend="cpu", output_lengths=[3, 5], prompt_lengths=[4], batch_sizes=[1], runs=4)


@pytest.fixture
def results(backend: Any, clock: Any, tmp_path: Path) -> Json:
    return run_sweep(SETTINGS, backend, tmp_path / "sweep.json", clock=clock)


def set_to(*path: Any, value: Any) -> Callable[[Json], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_to("schema", value="kimi-k2/sweep/0"), "expected schema 'kimi-k2/sweep/2', got 'kimi-k2/sweep/0'"),
        (set_to("cells", value={}), "cells: Input should be a valid list, got {}"),
        (
            set_to("cells", 0, "batch_size", value="1"),
            r"cells\[0\].batch_size: .* a valid integer, got '1'",
        ),
        (set_to("cells", 0, "runs", value=[]), r"cells\[0\].runs: List should have at least 1 item"),
        (
            set_to("cells", 0, "runs", 1, "ttft", value=None),
            r"cells\[0\].runs\[1\].ttft: .* a valid number",
        ),
        (set_to("cells", 0, "runs", 1, "itl", 0, value=float("nan")), r"cells\[0\].runs\[1\].itl\[0\]"),
        (set_to("cells", 1, "runs", 0, "itl", value=[1.0]), r"expected 4 gaps \(output_length - 1\), got 1"),
        (set_to("cells", 1, "peak_memory", value={}), r"cells\[1\].peak_memory"),
        (set_to("environment", value=None), "environment: Input should be a valid dictionary"),
    ],
)
def test_damaged_results_are_named(results: Json, tmp_path: Path, change: Callable[[Json], None], says: str) -> None:
    broken = copy.deepcopy(results)
    change(broken)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(SweepError, match=says) as caught:
        load_results(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", '{"schema": "kimi-k2/sweep/2", "cells": [', "[]", "\x00\xff", "null"])
def test_garbage_is_a_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "garbage.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(SweepError, match=r"garbage\.json"):
        load_results(path)
    result = kimi("bench", "--compare", path, path, status=None)
    assert isinstance(result.exception, SweepError)
    with pytest.raises(SweepError, match="no such file"):
        load_results(tmp_path / "absent.json")


def scaled(results: Json, factors: list[float]) -> Json:
    """The same sweep with run i's times multiplied by factors[i]."""
    other = copy.deepcopy(results)
    for cell in other["cells"]:
        for run, factor in zip(cell["runs"], factors, strict=True):
            run["ttft"] *= factor
            run["itl"] = [gap * factor for gap in run["itl"]]
    return other


def test_a_real_difference_and_noise_are_told_apart(results: Json) -> None:
    base = scaled(results, [1.0, 1.02, 0.98, 1.01])
    for ratio in compare(base, scaled(results, [0.5, 0.51, 0.49, 0.5])):
        assert ratio.ratio == pytest.approx(0.5 / 1.005)
        assert ratio.low == pytest.approx(0.49 / 1.02) and ratio.high == pytest.approx(0.51 / 0.98)
        assert not ratio.inside_noise
        assert ratio.verdict.startswith("faster by 50")
    noisy = compare(base, scaled(results, [1.03, 1.0, 0.99, 1.05]))
    assert all(ratio.inside_noise and ratio.verdict == "inside the noise" for ratio in noisy)
    steady = [1.0, 1.001, 0.999, 1.0]
    little = compare(scaled(results, steady), scaled(results, [0.98 * factor for factor in steady]))
    assert all(
        ratio.high < 1 and ratio.inside_noise for ratio in little
    )  # as much as two sweeps of the same code differ
    # The drift is of the logarithm: 2.9 % more is still as much, 3.1 % more is not.
    for factor, same in ((1.029, True), (1.031, False), (1 / 1.029, True), (1 / 1.031, False)):
        ratios = compare(scaled(results, [1.0] * 4), scaled(results, [factor] * 4))
        tight = [ratio for ratio in ratios if not ratio.low <= 1 <= ratio.high]
        assert all(ratio.inside_noise is same for ratio in tight)
        assert same or tight
    assert overall(compare(base, base)) == pytest.approx({"ttft": 1, "tpot": 1, "e2e": 1})


def test_ratios_are_averaged_geometrically() -> None:
    """A cell twice as fast and one twice as slow are even."""
    ratios = [Ratio(8, 1, 8, "tpot", ratio, ratio, ratio) for ratio in (0.5, 2.0)]
    assert overall([*ratios, Ratio(8, 1, 8, "ttft", 0.25, 0.25, 0.25)]) == pytest.approx({"tpot": 1, "ttft": 0.25})


def test_comparison_names_what_differs_and_needs_common_cells(results: Json, tmp_path: Path) -> None:
    other = copy.deepcopy(results)
    other["environment"]["torch_threads"] = 77
    assert [line for line in differing(results, other) if "torch_threads" in line]
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    shown = kimi("bench", "--compare", tmp_path / "sweep.json", path, env={"COLUMNS": "160"})
    assert "inside the noise" in shown.output and "77" in shown.output
    for cell in other["cells"]:
        cell["prompt_length"] += 1
    with pytest.raises(SweepError, match="no finished cell in common"):
        compare(results, other)


def test_markdown_has_a_row_a_cell_and_the_plots(results: Json, tmp_path: Path) -> None:
    written = write_reports(results, tmp_path)
    assert [path.name for path in written] == ["sweep.md", "tpot.png", "ttft.png", "throughput.png"]
    text = written[0].read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(results["cells"])
    assert all(line.count("|") == len(HEADER) + 1 for line in lines)
    assert all(f"({path.name})" in text for path in written[1:])


def test_a_sweep_without_a_finished_cell_still_reports(backend: Any, clock: Any, tmp_path: Path) -> None:
    backend.fail_at = 3
    settings = SETTINGS.model_copy(update={"output_lengths": [3]})
    results = run_sweep(settings, backend, tmp_path / "sweep.json", clock=clock)
    (path,) = write_reports(results, tmp_path)
    assert "out of memory" in path.read_text()
