"""Two sweeps side by side: ratios, their spread over runs, and whether a difference is more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.results import end_to_end, percentile, tpot

METRICS: dict[str, Callable[[dict[str, Any]], float]] = {
    "ttft": lambda run: run["ttft"],
    "tpot": tpot,
    "e2e": end_to_end,
}
# Runs of one process vary less than processes do (memory layout, neighbours, clocks): two sweeps of one commit on a
# shared two-core machine differed by up to 2.6 % with runs that did not overlap.
DRIFT = 0.03
KEYS = ("prompt_length", "batch_size", "output_length")


@dataclass(frozen=True)
class Ratio:
    """b over a for one metric of one cell; below 1, b is faster.

    Attributes:
        prompt_length, batch_size, output_length: the cell.
        metric: ttft, tpot or e2e.
        ratio: of the medians over runs.
        low, high: fastest run of b over slowest of a, and the other way round. If 1 lies between, the runs overlap.
        drift: difference that two sweeps of the same code may have.
    """

    prompt_length: int
    batch_size: int
    output_length: int
    metric: str
    ratio: float
    low: float
    high: float
    drift: float = DRIFT

    @property
    def inside_noise(self) -> bool:
        """Whether the runs overlap, or the medians differ by less than the drift between sweeps."""
        return self.low <= 1 <= self.high or abs(math.log(self.ratio)) <= math.log1p(self.drift)

    @property
    def verdict(self) -> str:
        """In words."""
        if self.inside_noise:
            return "inside the noise"
        return f"{'faster' if self.ratio < 1 else 'slower'} by {abs(1 - self.ratio) * 100:.1f} %"


def compare(a: dict[str, Any], b: dict[str, Any], drift: float = DRIFT) -> list[Ratio]:
    """Ratios of all cells that both sweeps finished.

    Raises:
        SweepError: they have none in common, or the drift is negative.
    """
    if drift < 0:
        raise SweepError(f"drift: expected at least 0, got {drift}")
    first, second = ({tuple(c[k] for k in KEYS): c for c in s["cells"] if c["status"] == "ok"} for s in (a, b))
    ratios = []
    for key in sorted(first.keys() & second.keys()):
        prompt, batch, output = key
        for metric, value in METRICS.items():
            old, new = ([value(run) for run in side[key]["runs"]] for side in (first, second))
            middle = percentile(new, 50) / percentile(old, 50)
            ratios.append(Ratio(prompt, batch, output, metric, middle, min(new) / max(old), max(new) / min(old), drift))
    if not ratios:
        raise SweepError("the two sweeps have no finished cell in common")
    return ratios


def overall(ratios: list[Ratio]) -> dict[str, float]:
    """Geometric mean of the ratios by metric."""
    return {
        metric: math.exp(math.fsum(math.log(r.ratio) for r in ratios if r.metric == metric) / count)
        for metric in METRICS
        if (count := sum(r.metric == metric for r in ratios))
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Fields of settings and environment that differ: what the ratio may be owed to."""
    lines = []
    for part in ("settings", "environment"):
        for field in sorted({**a[part], **b[part]}):
            old, new = a[part].get(field), b[part].get(field)
            if old != new:
                lines.append(f"{part}.{field}: {old!r} -> {new!r}")
    return lines
