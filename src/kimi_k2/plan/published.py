"""What others published: decode steps on Trainium with a bound of each, memory of a rank, and figures of GPUs.

All of it is in published.json with its sources and with the rules by which it is used. Reported, not reproduced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

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
def data() -> dict[str, Any]:
    """The file."""
    text = (files("kimi_k2.plan") / "published.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
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
