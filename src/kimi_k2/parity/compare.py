"""Two traces point by point, and the first point that is off: what comes after it is off because of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.parity.logits import DIVERGENCE_TOLERANCE, TOLERANCE_MAP, LogitCheck, check_logits
from kimi_k2.parity.trace import PHASES, ParityError, Trace, layer_of, order

# Relative L2 of a point that another order of summation explains, by the less exact of the two runs' dtypes; and the
# share of expert choices that near-ties may change.
TOLERANCES = {"float64": (1e-9, 0.0), "float32": (1e-4, 0.0), "bfloat16": (5e-2, 0.1)}


@dataclass(frozen=True)
class PointError:
    """How far one point is off.

    Attributes:
        relative_l2: norm of the difference over norm of the expected values; for `mlp.gate.selection` the share of
            choices that differ.
        max_difference: largest absolute difference.
        row: the first row that is over the tolerance, None if none is.
        passed: whether every row is within the tolerance.
    """

    phase: str
    point: str
    relative_l2: float
    max_difference: float
    row: int | None
    passed: bool

    @property
    def layer(self) -> int | None:
        """Decoder layer, if the point is in one."""
        return layer_of(self.point)

    @property
    def module(self) -> str:
        """The point without its layer."""
        return self.point if self.layer is None else self.point.split(".", 2)[2]


@dataclass(frozen=True)
class Comparison:
    """All points in order of computation, prefill before decode."""

    points: list[PointError]
    logits: LogitCheck

    @property
    def first(self) -> PointError | None:
        """The first point that diverges."""
        return next((point for point in self.points if not point.passed), None)

    @property
    def passed(self) -> bool:
        """Whether no point diverges and the logits are within NxDI's tolerances."""
        return self.first is None and self.logits.passed


def compare(actual: Trace, expected: Trace, config: KimiK2Config, dtype: str = "float32") -> Comparison:
    """Compare the points that both runs have.

    Args:
        actual: the run that is judged.
        expected: the golden run.
        config: of the model; it gives the order of the points.
        dtype: the less exact of the two runs'.

    Raises:
        ParityError: the runs had other tokens, a point has another shape, they share none, or logits hold NaN.
    """
    for name in ("prompt", "forced"):
        ours, theirs = (list(getattr(trace.inputs, name)) for trace in (actual, expected))
        if len(ours) != len(theirs):
            raise ParityError(f"{name}: expected {len(theirs)} tokens, as in the golden run, got {len(ours)}")
        if ours != theirs:
            raise ParityError(f"{name}: other tokens than in the golden run")
    if dtype not in TOLERANCES:
        raise ParityError(f"dtype: expected one of {', '.join(TOLERANCES)}, got {dtype}")
    logits = check_logits(*(torch.cat([t.logits(p) for p in PHASES if t.inputs.rows(p)]) for t in (actual, expected)))
    points = [
        point_error(phase, point, actual.values[key], expected.values[key], TOLERANCES[dtype])
        for phase in PHASES
        for point in order(config)
        if (key := f"{phase}/{point}") in actual.values and key in expected.values
    ]
    return Comparison(points, logits)


def point_error(
    phase: str, point: str, actual: Tensor, expected: Tensor, tolerances: tuple[float, float]
) -> PointError:
    """Of a point [rows, ...]; `tolerances` are a row's relative L2, and the share of choices that may differ.

    Raises:
        ParityError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ParityError(f"{phase}/{point}: expected shape {list(expected.shape)}, got {list(actual.shape)}")
    values, choices = tolerances
    if point.endswith("selection"):
        same = (actual[:, :, None] == expected[:, None, :]).any(-1)
        rows = 1 - same.double().mean(-1)
        share = float(rows.mean())
        failed = rows > 0 if choices == 0 else torch.full_like(rows, share > choices, dtype=torch.bool)
        return PointError(phase, point, share, float(rows.max()), _first_row(failed), not bool(failed.any()))
    a, e = actual.double().flatten(1), expected.double().flatten(1)
    difference = a - e
    # A row on its own: one dropped token must not vanish among hundreds. A row of zeros has the mean norm as its scale.
    norms = torch.linalg.vector_norm(e, dim=1)
    scale = torch.where(norms > 0, norms, norms.mean().clamp(min=1e-30))
    rows = torch.linalg.vector_norm(difference, dim=1) / scale
    failed = ~(rows <= values)  # NaN fails
    total = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(e).clamp(min=1e-30))
    return PointError(phase, point, total, float(difference.abs().max()), _first_row(failed), not bool(failed.any()))


def _first_row(failed: Tensor) -> int | None:
    rows_off = failed.nonzero()
    return int(rows_off[0]) if len(rows_off) else None


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, for a file."""
    first = comparison.first
    return {
        "passed": comparison.passed,
        "first_divergence": asdict(first) if first else None,
        "logits": {**asdict(comparison.logits), "passed": comparison.logits.passed},
        "points": [asdict(point) for point in comparison.points],
    }


def _worst_by_layer(comparison: Comparison) -> dict[tuple[str, int | None], PointError]:
    groups: dict[tuple[str, int | None], list[PointError]] = defaultdict(list)
    for point in comparison.points:
        groups[point.phase, point.layer].append(point)
    return {key: max(points, key=lambda p: (not p.passed, p.relative_l2)) for key, points in groups.items()}


def print_report(comparison: Comparison, console: Console) -> None:
    """A row a layer, the logits by NxDI's rule, and the first module that diverges."""
    table = Table("phase", "layer", "worst point", "relative L2", "max difference", "")
    for (phase, layer), worst in _worst_by_layer(comparison).items():
        mark = Text("" if worst.passed else "diverges", "red")
        name = "-" if layer is None else str(layer)
        table.add_row(phase, name, worst.module, f"{worst.relative_l2:.1e}", f"{worst.max_difference:.1e}", mark)
    console.print(table)
    logits = Table("logits, top k", "atol, rtol", "largest difference / tolerated", title="NxDI's tolerance map")
    for k, (atol, rtol) in TOLERANCE_MAP.items():
        logits.add_row(str(k or "all"), f"{atol:g}, {rtol:g}", f"{comparison.logits.excess[str(k or 'all')]:.3f}")
    console.print(logits)
    steps = comparison.logits.divergences
    console.print(
        f"largest logit difference {comparison.logits.max_difference:.2e}; another token first at {len(steps)} steps"
        f" (difference {comparison.logits.divergence_difference:.1e}, tolerated {DIVERGENCE_TOLERANCE:g})",
    )
    if (first := comparison.first) is not None:
        where = "outside the layers" if first.layer is None else f"layer {first.layer}"
        error = f"relative L2 {first.relative_l2:.1e}, first at row {first.row}"
        console.print(f"first divergence: {first.phase}, {where}, {first.module} ({error})", style="bold red")
    console.print("PASS" if comparison.passed else "FAIL", style="bold green" if comparison.passed else "bold red")
