"""Result files: their schema, reading with validation, and the statistics of a cell.

All times are in seconds, all sizes in bytes. Whoever changes the meaning of a field raises the number in SCHEMA.
`Sweep.model_json_schema()` is the schema for other readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from kimi_k2.bench.errors import SweepError
from kimi_k2.files import read_data

SCHEMA = "kimi-k2/sweep/1"
PERCENTILES = (50, 90, 99)
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Counts = Annotated[list[PositiveInt], Field(min_length=1)]


class _Part(BaseModel):
    """A level of a result, whose fields are all there is."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Run(_Part):
    """From the call to the first token, and the gaps between neighbouring tokens."""

    ttft: Seconds
    itl: Annotated[list[Seconds], Field(min_length=1)]


class Percentiles(_Part):
    """Over runs; of the gaps over all of them."""

    p50: Seconds
    p90: Seconds
    p99: Seconds


class Summary(_Part):
    """See `summarize`."""

    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    e2e: Percentiles
    tokens_per_second_sequence: float
    tokens_per_second_total: float


class PeakMemory(_Part):
    """Of the process or the device; None where it is not known."""

    bytes: int | None
    kind: str


class _Cell(_Part):
    prompt_length: PositiveInt
    batch_size: PositiveInt
    output_length: Annotated[int, Field(ge=2)]


class FailedCell(_Cell):
    """A cell that is tried again by a rerun."""

    status: Literal["failed"]
    error: str


class FinishedCell(_Cell):
    """A cell's runs, each with output_length - 1 gaps."""

    status: Literal["ok"]
    runs: Annotated[list[Run], Field(min_length=1)]
    summary: Summary
    peak_memory: PeakMemory

    @model_validator(mode="after")
    def _gaps(self) -> FinishedCell:
        gaps = self.output_length - 1
        for run in self.runs:
            if len(run.itl) != gaps:
                raise ValueError(f"expected {gaps} gaps (output_length - 1), got {len(run.itl)}")
        return self


class SweepSettings(BaseModel):
    """What was asked for; a rerun with the same settings and environment continues."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str
    backend: Literal["cpu", "cuda", "neuron"]
    output_lengths: Counts
    prompt_lengths: Counts
    batch_sizes: Counts
    runs: PositiveInt
    warmup: Annotated[int, Field(ge=0)]
    seed: int


class Machine(BaseModel):
    """Versions, device, compiler flags, preset and commit; no host names and no paths."""

    model_config = ConfigDict(extra="allow")
    python: Any
    system: Any
    versions: Any
    commit: Any


class Sweep(_Part):
    """A result file."""

    version: Annotated[Literal["kimi-k2/sweep/1"], Field(alias="schema")]
    settings: SweepSettings
    environment: Machine
    cells: list[Annotated[FailedCell | FinishedCell, Field(discriminator="status")]]


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


def series(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds by name: ttft, tpot and e2e (from the call to the last token) of each run; itl, all gaps of all runs."""
    return {
        "ttft": [run["ttft"] for run in runs],
        "tpot": [tpot(run) for run in runs],
        "itl": [gap for run in runs for gap in run["itl"]],
        "e2e": [run["ttft"] + math.fsum(run["itl"]) for run in runs],
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
        SweepError: it is missing, truncated, of another schema version, or a field is missing, unknown or mistyped.
    """
    try:
        content = read_data(path, SweepError)
    except FileNotFoundError:
        raise SweepError("no such file", file=path) from None
    version = content.get("schema") if isinstance(content, dict) else None
    if version != SCHEMA:
        raise SweepError(f"expected schema {SCHEMA!r}, got {version!r}", file=path)
    try:
        Sweep.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        # The status of a cell, by which its model is chosen, stands in the place behind its number.
        place = [part for part in first["loc"] if part not in ("ok", "failed")]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
        raise SweepError(f"{where}: {first['msg']}, got {first['input']!r:.60}", file=path) from error
    result: dict[str, Any] = content
    return result
