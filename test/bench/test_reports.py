"""Result files that are no result files, and reports that need nothing from outside."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.bench.render import HEADER, write_reports
from kimi_k2.bench.results import Settings, load_results
from kimi_k2.bench.sweep import run_sweep
from kimi_k2.errors import ConfigError
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
        (set_to("schema", value="kimi-k2/sweep/0"), "schema.*'kimi-k2/sweep/2', got 'kimi-k2/sweep/0'"),
        (set_to("cells", value={}), "'cells': Input should be a valid list, got {}"),
        (
            set_to("cells", 0, "batch_size", value="1"),
            r"cells\.0\.batch_size': .* a valid integer, got '1'",
        ),
        (set_to("cells", 0, "runs", value=[]), r"cells\.0\.runs': List should have at least 1 item"),
        (
            set_to("cells", 0, "runs", 1, "ttft", value=None),
            r"cells\.0\.runs\.1\.ttft': .* a valid number",
        ),
        (set_to("cells", 0, "runs", 1, "itl", 0, value=float("nan")), r"cells\.0\.runs\.1\.itl\.0'"),
        (set_to("cells", 1, "runs", 0, "itl", value=[1.0]), r"expected 4 gaps \(output_length - 1\), got 1"),
        (set_to("cells", 1, "peak_memory", value={}), r"cells\.1\.peak_memory\.bytes': missing"),
        (set_to("environment", value=None), "'environment': Input should be a valid dictionary"),
    ],
)
def test_damaged_results_are_named(results: Json, tmp_path: Path, change: Callable[[Json], None], says: str) -> None:
    broken = copy.deepcopy(results)
    change(broken)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match=says) as caught:
        load_results(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", '{"schema": "kimi-k2/sweep/2", "cells": [', "[]", "\x00\xff", "null"])
def test_garbage_is_a_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "garbage.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"garbage\.json"):
        load_results(path)
    with pytest.raises(ConfigError, match="no such file"):
        load_results(tmp_path / "absent.json")


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
