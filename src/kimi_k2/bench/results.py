"""Result files: their schema (sweep.schema.json), reading with validation, and the statistics of a cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_k2.bench.errors import SweepError
from kimi_k2.files import read_json

SCHEMA = "kimi-k2/sweep/1"
SCHEMA_FILE = Path(__file__).with_name("sweep.schema.json")
PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between order statistics (numpy's default; Hyndman and Fan's type 7)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def tpot(run: dict[str, Any]) -> float:
    """Seconds a token after the first: the time from the first to the last over their number."""
    return math.fsum(run["itl"]) / len(run["itl"])


def end_to_end(run: dict[str, Any]) -> float:
    """Seconds from the call to the last token."""
    result: float = run["ttft"] + math.fsum(run["itl"])
    return result


def series(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds by name: ttft, tpot and e2e of each run, and itl, all gaps of all runs."""
    return {
        "ttft": [run["ttft"] for run in runs],
        "tpot": [tpot(run) for run in runs],
        "itl": [gap for run in runs for gap in run["itl"]],
        "e2e": [end_to_end(run) for run in runs],
    }


def summarize(runs: list[dict[str, Any]], batch_size: int) -> dict[str, Any]:
    """Percentiles over runs (ITL: over all gaps of all runs) and tokens a second from medians.

    `tokens_per_second_sequence` is 1 / TPOT, `tokens_per_second_total` all tokens of the batch, the first included,
    over end-to-end time.
    """
    summary: dict[str, Any] = {
        name: {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
        for name, values in series(runs).items()
    }
    tokens = len(runs[0]["itl"]) + 1
    summary["tokens_per_second_sequence"] = 1 / summary["tpot"]["p50"]
    summary["tokens_per_second_total"] = batch_size * tokens / summary["e2e"]["p50"]
    return summary


def load_results(path: Path) -> dict[str, Any]:
    """Read and check a result file.

    Raises:
        SweepError: it is missing, truncated, of another schema version, or a field is missing or mistyped.
    """
    try:
        content = read_json(path, SweepError)
    except FileNotFoundError:
        raise SweepError("no such file", file=path) from None
    version = content.get("schema") if isinstance(content, dict) else None
    if version != SCHEMA:
        raise SweepError(f"expected schema {SCHEMA!r}, got {version!r}", file=path)
    if problem := first_problem(content):
        raise SweepError(problem, file=path)
    result: dict[str, Any] = content
    return result


# The keys that each level of a result must have, with their types; sweep.schema.json says the same and more.
_NUMBER = (int, float)
_TOP = {"settings": dict, "environment": dict, "cells": list}
_CELL = {"prompt_length": int, "batch_size": int, "output_length": int, "status": str}


def first_problem(content: dict[str, Any]) -> str | None:
    """The first field that is missing or mistyped, without needing the jsonschema package; None if there is none."""
    if problem := _missing(content, _TOP, ""):
        return problem
    for number, cell in enumerate(content["cells"]):
        where = f"cells[{number}]"
        if not isinstance(cell, dict):
            return f"{where}: expected an object"
        needed: dict[str, Any] = {**_CELL, **({"error": str} if cell.get("status") == "failed" else {"runs": list})}
        if problem := _missing(cell, needed, f"{where}."):
            return problem
        if cell["status"] == "failed":
            continue
        for place, run in enumerate(cell["runs"]):
            at = f"{where}.runs[{place}]"
            good = isinstance(run, dict) and isinstance(run.get("itl"), list)
            gaps = run["itl"] if good else []
            if not good or not all(_positive(value) for value in (run.get("ttft"), *gaps)):
                return f"{at}: expected positive finite numbers ttft and itl"
            if len(gaps) != cell["output_length"] - 1:
                return f"{at}: expected {cell['output_length'] - 1} gaps (output_length - 1), got {len(gaps)}"
        if not cell["runs"]:
            return f"{where}.runs: expected at least one"
        expected = summarize(cell["runs"], cell["batch_size"])
        stored = cell.get("summary")
        if not isinstance(stored, dict) or stored.keys() != expected.keys():
            return f"{where}.summary: expected {', '.join(expected)}"
    return None


def _positive(value: object) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _missing(content: dict[str, Any], needed: dict[str, Any], where: str) -> str | None:
    for name, kind in needed.items():
        if not isinstance(content.get(name), kind):
            return f"{where}{name}: expected {kind.__name__}, got {type(content.get(name)).__name__}"
    return None
