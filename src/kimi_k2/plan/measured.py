"""Figures of a machine in place of those that are assumed: what nccom-test and neuron-profile write as JSON.

Or the report of `kimi-k2 rehearse --on-device`, which holds nccom-test's rows.

`nccom-test -r 64 -b 1kb -e 16mb -f 4 -d fp32 --report-to-json-file FILE allr` times all-reduces by size (nccom-test.rst
of aws-neuron-sdk). `neuron-profile view --output-format summary-json`, of one logical core and an execution of the
decode step, has the bytes that the DMA engines moved and how long any was at work (profile-schema-reference.rst). A
file of `--output-format json` holds the same summary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from kimi_k2.config_fields import first_fault
from kimi_k2.errors import ConfigError
from kimi_k2.files import Json, read_data
from kimi_k2.plan.machines import Machine

REHEARSAL = "kimi-k2/rehearsal/1"
_ACTIVE = "dma_active_time"
Number = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class _AllReduce(BaseModel):
    """A row of nccom-test."""

    size: Number = Field(alias="size(B)")
    microseconds: Number = Field(validation_alias=AliasChoices("time:avg(us)", "time:p50(us)"))


class _Results(BaseModel):
    """What nccom-test writes."""

    results: Annotated[list[_AllReduce], Field(min_length=1)]


class _Summary(BaseModel):
    """What neuron-profile writes."""

    hbm_read_bytes: Number
    hbm_write_bytes: Number
    dma_active_time: Number


@dataclass(frozen=True)
class Measured:
    """What was measured of a machine; None or empty where it was not.

    Attributes:
        collectives: bytes and seconds of all-reduces, by size.
        bytes_per_second: of a logical core's HBM while its DMA engines are at work.
    """

    collectives: tuple[tuple[int, float], ...] = ()
    bytes_per_second: float | None = None

    def on(self, machine: Machine) -> Machine:
        """The machine with these in place of what is assumed or quoted.

        Raises:
            ConfigError: more bytes a second than the machine has.
        """
        measured, source = machine, machine.source
        if self.bytes_per_second is not None:
            if self.bytes_per_second > machine.bytes_per_second:
                raise ConfigError(
                    f"expected at most {machine.bytes_per_second / 1e9:.0f} GB/s, the peak of one logical core, got"
                    f" {self.bytes_per_second / 1e9:.0f}",
                    field=_ACTIVE,
                )
            measured = replace(measured, bytes_per_second=self.bytes_per_second)
            source += "; HBM's rate as measured (neuron-profile)"
        if self.collectives:
            measured = replace(measured, collectives=self.collectives)
            source += "; collectives as measured (nccom-test)"
        return replace(measured, source=source)


def read_measured(paths: Iterable[Path]) -> Measured:
    """What files of nccom-test and neuron-profile say together; several of one kind are refused.

    Raises:
        ConfigError: a file is not there, none of theirs, or lacks a field.
    """
    collectives: tuple[tuple[int, float], ...] = ()
    rate: float | None = None
    for path in paths:
        try:
            raw = read_data(path, ConfigError)
            if isinstance(raw, dict) and raw.get("schema") == REHEARSAL:
                raw = {"results": _rehearsed(raw, path)}
            if isinstance(raw, dict) and "results" in raw:
                if collectives:
                    raise ConfigError("expected one file of nccom-test", file=path)
                rows = _Results.model_validate(raw).results
                collectives = tuple(sorted({int(row.size): row.microseconds * 1e-6 for row in rows}.items()))
            else:
                if rate is not None:
                    raise ConfigError("expected one file of neuron-profile", file=path)
                rate = _rate(raw, path)
        except FileNotFoundError:
            raise ConfigError("no such file", file=path) from None
        except ValidationError as error:
            raise first_fault(error, path) from None
    return Measured(collectives, rate)


def checksum(report: Json) -> str:
    """Of a rehearsal's report without its own: whether anything in it was changed."""
    fields = {name: value for name, value in report.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _rehearsed(report: Json, path: Path) -> Any:
    """The rows of nccom-test in a rehearsal's report."""
    if checksum(report) != report.get("checksum"):
        raise ConfigError("the report was changed", field="checksum", file=path)
    device = report.get("device")
    if not isinstance(device, dict) or not device.get("collectives"):
        raise ConfigError("expected a run on a device with nccom-test, nothing was measured", field="device", file=path)
    return device["collectives"]


def _rate(raw: Any, path: Path) -> float:
    if isinstance(raw, dict):
        raw = raw.get("summary", raw)
    if isinstance(raw, list) and len(raw) == 1:
        raw = raw[0]
    if not isinstance(raw, dict) or _ACTIVE not in raw:
        raise ConfigError(
            f"expected nccom-test's --report-to-json-file, or neuron-profile's summary-json with {_ACTIVE}", file=path
        )
    summary = _Summary.model_validate(raw)
    return (summary.hbm_read_bytes + summary.hbm_write_bytes) / summary.dma_active_time
