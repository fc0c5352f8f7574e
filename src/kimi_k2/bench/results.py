"""Result files: their schema, reading with validation, and the statistics of a cell.

All times are in seconds, all sizes in bytes. Whoever changes the meaning of a field raises the number in SCHEMA.
`Sweep.model_json_schema()` is the schema for other readers.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from kimi_k2.config_fields import first_fault
from kimi_k2.errors import ConfigError
from kimi_k2.files import Json, read_data

SCHEMA = "kimi-k2/sweep/2"
SHAPE = ("prompt_length", "batch_size", "output_length")  # of a cell
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Counts = Annotated[list[PositiveInt], Field(min_length=1)]


class _Level(BaseModel):
    """A level of a result, whose fields are all there is."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Run(_Level):
    """From the call to the first token, and the gaps between neighbouring tokens."""

    ttft: Seconds
    itl: Annotated[list[Seconds], Field(min_length=1)]


class PeakMemory(_Level):
    """Of the process or the device; None where it is not known."""

    bytes: int | None
    kind: str


class _Cell(_Level):
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
    peak_memory: PeakMemory

    @model_validator(mode="after")
    def _gaps(self) -> FinishedCell:
        gaps = self.output_length - 1
        for run in self.runs:
            if len(run.itl) != gaps:
                raise ValueError(f"expected {gaps} gaps (output_length - 1), got {len(run.itl)}")
        return self


class Settings(_Level):
    """What is swept; a rerun with the same settings and environment continues.

    Attributes:
        model: its name, for the report.
        backend: who runs it.
        output_lengths, prompt_lengths, batch_sizes: tokens, tokens, sequences.
        runs: timed runs of each cell, behind one that is not timed.
    """

    model: str
    backend: Literal["cpu", "cuda", "neuron"]
    output_lengths: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    prompt_lengths: Counts
    batch_sizes: Counts
    runs: PositiveInt

    @classmethod
    def of(cls, **fields: Any) -> Settings:
        """Raises ConfigError for an empty list or a number below its least."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise first_fault(error, None) from None

    def cells(self) -> list[dict[str, int]]:
        """All combinations, shortest first within a prompt length and batch size."""
        product = itertools.product(self.prompt_lengths, self.batch_sizes, self.output_lengths)
        return [dict(zip(SHAPE, values, strict=True)) for values in product]


class Machine(BaseModel):
    """Versions, device, compiler flags, preset and commit; no host names and no paths."""

    model_config = ConfigDict(extra="allow")
    python: Any
    system: Any
    versions: Any
    commit: Any


class Sweep(_Level):
    """A result file."""

    version: Annotated[Literal["kimi-k2/sweep/2"], Field(alias="schema")]
    settings: Settings
    environment: Machine
    cells: list[Annotated[FailedCell | FinishedCell, Field(discriminator="status")]]


def series(runs: list[Json]) -> dict[str, list[float]]:
    """Seconds by name: ttft, tpot (a token behind the first) and e2e of each run; itl, all gaps of all runs."""
    return {
        "ttft": [run["ttft"] for run in runs],
        "tpot": [statistics.fmean(run["itl"]) for run in runs],
        "itl": [gap for run in runs for gap in run["itl"]],
        "e2e": [run["ttft"] + math.fsum(run["itl"]) for run in runs],
    }


def rates(cell: Json) -> tuple[float, float]:
    """Tokens a second by medians: of a sequence behind its first token, and of the whole batch from end to end."""
    times = series(cell["runs"])
    tokens = cell["batch_size"] * cell["output_length"]
    return 1 / statistics.median(times["tpot"]), tokens / statistics.median(times["e2e"])


def load_results(path: Path) -> Json:
    """Read and check a result file.

    Raises:
        ConfigError: it is missing, truncated, of another schema version, or a field is missing, unknown or mistyped.
    """
    try:
        content: Json = read_data(path, ConfigError)
        Sweep.model_validate(content)
    except FileNotFoundError:
        raise ConfigError("no such file", file=path) from None
    except ValidationError as error:  # the status of a cell, by which its model is chosen, stands behind its number
        raise first_fault(error, path, lambda field: re.sub(r"\.(ok|failed)\b", "", field)) from None
    return content
