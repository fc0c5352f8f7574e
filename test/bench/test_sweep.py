"""What is timed, what is kept over a crash, and what a result file must look like."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from forked import python

from kimi_k2.api import KimiK2
from kimi_k2.bench.backend import Backend
from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.results import Settings, Sweep, load_results, rates, series
from kimi_k2.bench.sweep import capture, draw_prompts, run_sweep, time_run
from kimi_k2.errors import ConfigError

SETTINGS = Settings(
    model="tiny", backend="cpu", output_lengths=[2, 5], prompt_lengths=[3, 4], batch_sizes=[1, 2], runs=3
)


def test_figures_of_a_cell(backend: Any, clock: Any, tmp_path: Path) -> None:
    (cell,) = run_sweep(
        SETTINGS.model_copy(update={"prompt_lengths": [3], "batch_sizes": [2], "output_lengths": [6]}),
        backend, tmp_path / "s.json", clock=clock,
    )["cells"]  # fmt: skip
    times = series(cell["runs"])
    assert times["itl"] == [1.0, 3.0, 1.0, 3.0, 1.0] * 3
    assert times["tpot"] == pytest.approx([statistics.mean([1, 3, 1, 3, 1])] * 3) and times["e2e"] == [14.0] * 3
    assert rates(cell) == pytest.approx((1 / 1.8, 2 * 6 / 14))


def test_every_cell_runs_once_warm_and_three_times_timed(backend: Any, clock: Any, tmp_path: Path) -> None:
    results = run_sweep(SETTINGS, backend, tmp_path / "s.json", clock=clock)
    shapes = [(c["prompt_length"], c["batch_size"], c["output_length"]) for c in results["cells"]]
    assert shapes == [(p, b, o) for p in (3, 4) for b in (1, 2) for o in (2, 5)]
    assert len(backend.calls) == 8 * 4
    jsonschema.validate(json.loads((tmp_path / "s.json").read_text()), Sweep.model_json_schema())


def test_a_failing_cell_is_recorded_and_tried_again(backend: Any, clock: Any, tmp_path: Path) -> None:
    backend.fail_at = 5
    path = tmp_path / "s.json"
    results = run_sweep(SETTINGS, backend, path, clock=clock)
    failed = [cell for cell in results["cells"] if cell["status"] == "failed"]
    assert len(failed) == 4
    assert failed[0]["error"] == "RuntimeError: CUDA out of memory. Tried to read ..."  # no path, one line
    jsonschema.validate(results, Sweep.model_json_schema())
    backend.fail_at, backend.calls = None, []
    again = run_sweep(SETTINGS, backend, path, clock=clock)
    assert all(cell["status"] == "ok" for cell in again["cells"])
    assert {call[2] for call in backend.calls} == {5}  # finished cells were kept


def test_prompts_are_the_same_for_the_same_seed() -> None:
    first = draw_prompts(1000, 2, 9)
    assert first == draw_prompts(1000, 2, 9)
    assert first != draw_prompts(1000, 2, 10)
    assert all(0 <= token < 1000 for prompt in first for token in prompt)


def test_other_settings_do_not_mix(backend: Any, clock: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    run_sweep(SETTINGS, backend, path, clock=clock)
    with pytest.raises(SweepError, match=r"settings.runs 3, this one has 4"):
        run_sweep(SETTINGS.model_copy(update={"runs": 4}), backend, path, clock=clock)
    backend.details["dtype"] = "bfloat16"
    with pytest.raises(SweepError, match=r"environment.dtype"):
        run_sweep(SETTINGS, backend, path, clock=clock)


def test_environment_names_no_path_and_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type=transformer --cache_dir=/home/someone/cache -O1")
    text = json.dumps(capture({}))
    assert os.uname().nodename not in text
    assert "someone" not in text
    assert "--model-type=transformer --cache_dir=... -O1" in text


def bench(out: Path, *options: str, before: str = "pass") -> list[str]:
    code = f"from kimi_k2.cli import main; {before}; main()"
    return [*python(), "-c", code, "bench", "tiny", "--out", str(out), *options]


# The first run of 20 tokens does not come back, so that the kill comes in its middle on a slow machine, too.
HANG = """
import time
from kimi_k2.bench import sweep
run = sweep.time_run
sweep.time_run = lambda *a, **k: (run(*a, **k), a[2] < 20 or time.sleep(600))[0]
"""


def test_killed_sweep_continues(tmp_path: Path) -> None:
    """SIGKILL in the middle: finished cells are kept to the bit, the file is whole, the rest is done by the rerun."""
    options = ("--output-lengths", "2,3,4,20", "--prompt-lengths", "4", "--runs", "2")
    command = bench(tmp_path, *options)
    process = subprocess.Popen(
        bench(tmp_path, *options, before=f"exec({HANG!r})"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[3/4]"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.read()  # until the program behind it is gone, too
    process.stderr.close()
    before = load_results(tmp_path / "sweep.json")["cells"]
    assert [cell["output_length"] for cell in before] == [2, 3, 4]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kept") == 3
    after = load_results(tmp_path / "sweep.json")
    assert after["cells"][:3] == before
    assert len(after["cells"]) == 4
    jsonschema.validate(after, Sweep.model_json_schema())


def test_plain_model_makes_every_step(fp8: Path) -> None:
    backend = Backend(KimiK2.from_pretrained(fp8), "cpu", {"weights": "float"})
    assert backend.details == {
        "dtype": "float32", "kv_cache": "float32", "batch_invariant": False, "graph": False, "weights": "float"
    }  # fmt: skip
    run = time_run(backend, [[1, 2, 3], [4, 5, 6]], 7)
    assert len(run["itl"]) == 6
    start = time.perf_counter()
    whole = time_run(backend, [[1, 2, 3]], 7)
    assert whole["ttft"] + sum(whole["itl"]) <= time.perf_counter() - start
    backend.reset_peak_memory()
    size, kind = backend.peak_memory()
    assert kind == "resident memory of the process"
    assert size is not None and size > 2**20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"output_lengths": [1]}, r"output_lengths\.0': .*greater than or equal to 2, got 1"),
        ({"prompt_lengths": []}, "prompt_lengths': .*at least 1 item"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"runs": 0}, "runs': .*greater than 0"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings.of(**{**SETTINGS.model_dump(), **options})
