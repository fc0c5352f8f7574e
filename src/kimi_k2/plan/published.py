"""What others published, and what a decode step may be expected to take by it.

Decode steps on Trainium with a bound of each, memory of a rank, and figures of GPUs: all of it is in published.json
with its sources and with the rules by which it is used. Reported, not reproduced.

A step's time is taken for the sum of three terms: bytes at a share of the peak rate, routed experts with block scales
at a share of their own, and a time a layer. They are fitted at every call, with the error of doing so; published.json
says which runs are taken and what a range is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from kimi_k2.files import Json
from kimi_k2.plan.deployment import Target
from kimi_k2.plan.machines import TRN2_LNC2

if TYPE_CHECKING:
    from kimi_k2.plan.cost import GraphCounts

COLLECTIVE = 15e-6  # seconds of a small collective, as in the bound of a deployment


@dataclass(frozen=True)
class Model:
    """Sizes of a model, as published.json has them: parameters, and values of the cache a token a layer."""

    layers: int
    dense_layers: int
    hidden: int
    attention: int
    down_projections: int
    expert: int
    experts: int
    chosen: int
    shared: int
    dense_mlp: int
    vocabulary: int
    cache: int
    cache_heads: int
    inferred: str = ""


@dataclass(frozen=True)
class Run:
    """A published decode step.

    Attributes:
        form: `xla`, `kernels` or `whole layers`.
        cores: logical cores over which the model lies, `ep` groups of them over which its experts do.
        tp: ranks that share dense weights; all cores if None.
        batch, context: of the compiled graph.
        weight_bytes, expert_bytes: of a value; of an expert's as of the others if None.
        all_local_experts: a step reads every expert of a core, chosen or not.
        whole_down_projections: MLA's are on every core.
        cache_copies: of a latent cache.
        block_scales: its experts are FP8 with a scale a block.
        tpot_ms, ttft_ms: published.
        set_apart: key of the rules; of a run that no fit takes.
    """

    name: str
    source: str
    form: str
    sdk: str
    hardware: str
    model: str
    cores: int
    batch: int
    context: int
    weight_bytes: int
    tpot_ms: float
    tp: int | None = None
    ep: int = 1
    expert_bytes: int | None = None
    all_local_experts: bool = False
    whole_down_projections: bool = False
    cache_copies: int = 1
    block_scales: bool = False
    ttft_ms: float | None = None
    note: str = ""
    set_apart: str | None = None

    @property
    def sizes(self) -> Model:
        """Of its model."""
        return _models()[self.model]

    @property
    def rate(self) -> float:
        """Bytes a second of one core's share of HBM, at peak."""
        return float(data()["hardware"][self.hardware]["bytes_per_second"])

    @property
    def expert_read(self) -> float:
        """Bytes of routed experts that a core reads a step: expected distinct ones under uniform routing, or all."""
        m = self.sizes
        if not m.experts:
            return 0.0
        distinct = m.experts * (1 - (1 - m.chosen / m.experts) ** self.batch)
        count = m.experts / self.ep if self.all_local_experts else distinct
        size = m.expert * (self.expert_bytes or self.weight_bytes)
        return (m.layers - m.dense_layers) * count * size * self.ep / self.cores

    @property
    def bytes_read(self) -> float:
        """Bytes that a core reads a step, as the run's layout has them: weights once, and the cache of the bucket."""
        m, ranks = self.sizes, self.tp or self.cores
        moe, wide = m.layers - m.dense_layers, self.weight_bytes
        dense: float = (m.layers * m.attention + moe * m.shared + m.dense_layers * m.dense_mlp) * wide / ranks
        dense += m.vocabulary * m.hidden * 2 / ranks + (moe * m.experts * m.hidden * 2)  # the router is on every core
        if self.whole_down_projections:
            dense += m.layers * m.down_projections * 2 * (1 - 1 / ranks)
        cache: float = m.layers * self.batch * self.context * m.cache * 2
        cache *= 1 / min(ranks, m.cache_heads) if m.cache_heads else self.cache_copies
        return dense + self.expert_read + cache

    @property
    def bound_ms(self) -> float:
        """Bytes at peak, and behind them two collectives a layer and one of the head."""
        return (self.bytes_read / self.rate + (2 * self.sizes.layers + 1) * COLLECTIVE) * 1e3


def source_words(name: str) -> str:
    """Repository, pull request and commit of a source."""
    source = data()["sources"][name]
    pull = f" pull request {source['pull_request']}" if "pull_request" in source else ""
    return f"{source['repository']}{pull}" + (f" at {source['commit']}" if "commit" in source else "")


@cache
def data() -> Json:
    """The file."""
    text = (files("kimi_k2.plan") / "published.json").read_text(encoding="utf-8")
    found: Json = json.loads(text)
    return found


@cache
def _models() -> dict[str, Model]:
    return {name: Model(**sizes) for name, sizes in data()["models"].items()}


@cache
def runs() -> tuple[Run, ...]:
    """All runs, in the file's order."""
    return tuple(Run(**row) for row in data()["runs"])


KIMI_HEADER = ["run, batch 1", "TPOT, ms", "TTFT, ms", "reported in", "note"]


def kimi_rows() -> list[list[str]]:
    """Of Kimi's runs, for tables; a figure that is no step's time says so."""
    apart = data()["rules"]["set_apart"]
    return [
        [
            run.name, f"{run.tpot_ms:g}", f"{run.ttft_ms:g}" if run.ttft_ms else "", source_words(run.source),
            apart[run.set_apart] if run.set_apart else "",
        ]
        for run in runs() if run.model == "Kimi-K2"
    ]  # fmt: skip


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
        terms = x * np.exp(theta)[:, None]  # [K, N, 3]
        whole = terms.sum(-1)
        slopes, residual = terms / whole[..., None], t - np.log(whole)
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


def expect(target: Target, counts: GraphCounts) -> Json | None:
    """Of a step on trn2, for a report; None on other machines, of which the published runs say nothing.

    Collectives beyond two a layer and one are added at what DeepSeek-V3's README profiled. `seconds`, `low` and `high`
    have block-scaled experts at what they cost the published ports; `if_scales_fuse` as fast as others, None without
    them. `nearest` are the runs that are most like it, in bytes, layers, batch and cores; several of one graph.
    """
    if target.machine.name != TRN2_LNC2.name:
        return None
    layers, scaled = target.config.num_hidden_layers, counts.block_scaled
    form = "whole layers" if target.layout.layers else "xla"
    found = fit(form)
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
    apart = np.square(np.log(of_rows / np.array(sizes, float))).sum(-1)
    return tuple(run for run, distance in zip(rows, apart, strict=True) if distance <= apart.min() * (1 + 1e-9))
