"""What a decode step may be expected to take: fitted to published runs at every call, with the error of doing so.

A step's time is taken for the sum of three terms: bytes at a share of the peak rate, routed experts with block scales
at a share of their own, and a time a layer. published.json says which runs are taken and what a range is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.memory import category, held_as
from kimi_k2.plan.published import Run, data, runs, source_words
from kimi_k2.plan.roofline import TRN2_LNC2, GraphCounts
from kimi_k2.plan.target import Target

ENOUGH = 8  # mixture-of-experts runs of a form; below that its dense ones are taken too
COVERED = 0.9  # of the left-out runs lie within the range
WIDE = 1.6  # a range that is wider, each way, is said to be
START = np.log((2.5, 6.0, 2e-4))
ROUNDS, DAMPING = 60, 1e-4


@dataclass(frozen=True)
class Fit:
    """Of one form.

    Attributes:
        rows: runs that were fitted.
        terms: what the peak-rate time of bytes and of block-scaled bytes is multiplied with, and seconds a layer.
        factor: of the range, each way.
        left_out: every run's published time over what the fit without its model gives.
    """

    rows: tuple[Run, ...]
    terms: tuple[float, float, float]
    factor: float
    left_out: dict[str, float]

    @property
    def models(self) -> int:
        """How many there are."""
        return len({run.model for run in self.rows})


def features(run: Run) -> tuple[float, float, float]:
    """Of a run: peak-rate seconds of ordinary and of block-scaled bytes, and layers."""
    scaled = run.expert_read if run.block_scales else 0.0
    return (run.bytes_read - scaled) / run.rate, scaled / run.rate, run.sizes.layers


def rows_of(form: str, without: str | None = None) -> tuple[Run, ...]:
    """Runs that a fit of a form takes, but for a model's."""
    usable = [run for run in runs() if run.form == form and run.set_apart is None]
    sparse = [run for run in usable if run.sizes.experts]
    chosen = sparse if len(sparse) >= ENOUGH else usable
    return tuple(run for run in chosen if run.model != without)


@cache
def fit(form: str, without: str | None = None) -> Fit:
    """Of all runs of a form, or of those of other models; its range from leaving each model out in turn."""
    rows = rows_of(form, without)
    x, t = np.array([features(run) for run in rows]), np.log([run.tpot_ms / 1e3 for run in rows])
    models = sorted({run.model for run in rows})
    kept = np.array([[run.model != model for run in rows] for model in (None, *models)], dtype=float)
    theta = _solve(x, t, kept)
    errors = t - np.log(np.exp(theta) @ x.T)  # [1 + models, runs]
    left_out = np.array([errors[1 + models.index(run.model), n] for n, run in enumerate(rows)])
    factor = np.sort(np.abs(left_out))[int(np.ceil(COVERED * len(rows))) - 1]
    ratios = {run.name: float(np.exp(error)) for run, error in zip(rows, left_out, strict=True)}
    first, second, third = (float(term) for term in np.exp(theta[0]))
    return Fit(rows, (first, second, third), float(np.exp(factor)), ratios)


def _solve(x: np.ndarray, t: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Logarithms of the terms, [K, 3], for each row of weights `kept` [K, N]: damped Gauss-Newton of log residuals."""
    theta = np.tile(START, (len(kept), 1))
    for _ in range(ROUNDS):
        parts = x * np.exp(theta)[:, None]  # [K, N, 3]
        whole = parts.sum(-1)
        slopes, residual = parts / whole[..., None], t - np.log(whole)
        normal = np.einsum("kni,kn,knj->kij", slopes, kept, slopes) + DAMPING * np.eye(3)
        step = np.linalg.solve(normal, np.einsum("kni,kn,kn->ki", slopes, kept, residual)[..., None])[..., 0]
        theta = theta + np.clip(step, -0.5, 0.5)
        theta[:, :2] = np.maximum(theta[:, :2], 0)  # no faster than the peak
    return theta


@dataclass(frozen=True)
class Range:
    """Seconds: the expected ones, and between which nine of ten are."""

    seconds: float
    low: float
    high: float

    @classmethod
    def around(cls, seconds: float, factor: float) -> Range:
        """A factor each way."""
        return cls(seconds, seconds / factor, seconds * factor)


def form_of(target: Target) -> str:
    """What a deployment's decode step runs on, in the words of published.json."""
    if target.decode_layers:
        return "whole layers"
    return "kernels" if target.layout.tiles else "xla"


def expect(config: KimiK2Config, target: Target, counts: GraphCounts) -> dict[str, Any] | None:
    """Of a step on trn2, for a report; None on other machines, of which the published runs say nothing.

    Collectives beyond two a layer and one are added at what DeepSeek-V3's README profiled. `seconds`, `low` and `high`
    have block-scaled experts at what they cost the published ports; `if_scales_fuse` as fast as others, None without
    them. `nearest` are the runs that are most like it, in bytes, layers, batch and cores; several of one graph.
    """
    if target.machine.name != TRN2_LNC2.name:
        return None
    form, layers = form_of(target), config.num_hidden_layers
    found = fit(form)
    blocks = form == "xla" and held_as(config, target).block > 0
    scaled = sum(size for name, size in counts.read.items() if blocks and category(name).startswith("expert"))
    x = (counts.memory_bytes - scaled) / TRN2_LNC2.bytes_per_second, scaled / TRN2_LNC2.bytes_per_second, layers
    more = sum(counts.collectives.values()) - (2 * layers + 1)
    rest = max(more, 0) * data()["collective"]["seconds"] + found.terms[0] * x[0] + found.terms[2] * x[2]
    sizes = counts.memory_bytes, layers, target.rows, target.layout.ranks
    return {
        "form": form,
        **asdict(Range.around(rest + found.terms[1] * x[1], found.factor)),
        "if_scales_fuse": asdict(Range.around(rest + found.terms[0] * x[1], found.factor)) if scaled else None,
        "factor": found.factor,
        "wide": found.factor > WIDE,
        "fitted": {"runs": len(found.rows), "models": found.models},
        "nearest": [
            {"run": run.name, "tpot": run.tpot_ms / 1e3, "source": source_words(run.source)}
            for run in _nearest(found.rows, sizes)
        ],
    }


def _nearest(rows: tuple[Run, ...], sizes: tuple[int, ...]) -> tuple[Run, ...]:
    of_rows = np.array([(run.bytes_read, run.sizes.layers, run.batch, run.cores) for run in rows])
    apart = np.square(np.log(of_rows / np.array(sizes))).sum(-1)
    return tuple(run for run, distance in zip(rows, apart, strict=True) if distance <= apart.min() * (1 + 1e-9))
