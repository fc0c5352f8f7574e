"""Two traces point by point, and the first point that is off: what comes after it is off because of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.parity.logits import LogitCheck, check_logits
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
        _point(phase, point, actual.values[key], expected.values[key], dtype)
        for phase in PHASES
        for point in order(config)
        if (key := f"{phase}/{point}") in actual.values and key in expected.values
    ]
    return Comparison(points, logits)


def _point(phase: str, point: str, actual: Tensor, expected: Tensor, dtype: str) -> PointError:
    if actual.shape != expected.shape:
        raise ParityError(f"{phase}/{point}: expected shape {list(expected.shape)}, got {list(actual.shape)}")
    values, choices = TOLERANCES[dtype]
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
    places = failed.nonzero()
    return int(places[0]) if len(places) else None
