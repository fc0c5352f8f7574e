"""MLA decode attention over drawn batches: lengths from 1 to 131,072, 1 to 256 sequences, 8, 16 and 64 heads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kimi_k2.bench.kernels import mla
from kimi_k2.bench.kernels.harness import Row, in_turns
from kimi_k2.bench.kernels.mla_cases import Inputs
from kimi_k2.bench.kernels.mla_peers import RoundedQueries
from kimi_k2.kernels.attention.mla_plan import available, pays
from kimi_k2.kernels.attention.mla_sizes import LATENT, PAGE, ROW

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 67, 96, 128, 140, 192, 256)
HEADS = (8, 16, 64)
MOST = 131072
# Cached rows of a case, so that two sets of inputs fit a GPU and many cases into minutes.
MOST_ROWS = 2**22
REPLAYS = 9


@dataclass(frozen=True)
class Case:
    """A batch.

    Attributes:
        kind: how its lengths were drawn.
        lengths: rows of each sequence.
        heads: of the queries.
        fp8: the cache is e4m3.
    """

    kind: str
    lengths: tuple[int, ...]
    heads: int
    fp8: bool

    @property
    def name(self) -> str:
        """What a row of the table says."""
        cache = ", e4m3 cache" if self.fp8 else ""
        middle, longest = sorted(self.lengths)[len(self.lengths) // 2], max(self.lengths)
        return f"{self.heads} heads, B={len(self.lengths)}, {self.kind}, median {middle}, max {longest}{cache}"


def drawn_cases(count: int, seed: int) -> list[Case]:
    """So many cases, the same for a seed: equal, uniform and lognormal lengths, and one or a few long among short."""
    draw = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        batch, heads, fp8 = draw.choice(BATCHES), draw.choice(HEADS), draw.random() < 0.3
        kind = draw.choice(("equal", "uniform", "lognormal", "few long"))
        top = int(2 ** draw.uniform(5, math.log2(MOST)))
        if kind == "equal":
            lengths = [top] * batch
        elif kind == "uniform":
            lengths = [draw.randint(1, top) for _ in range(batch)]
        elif kind == "lognormal":
            lengths = [max(1, min(MOST, int(draw.lognormvariate(math.log(top) - 1, 1.0)))) for _ in range(batch)]
        else:
            long = draw.randint(1, max(1, batch // 16))
            lengths = [top] * long + [draw.randint(1, 1 + top // 16) for _ in range(batch - long)]
            draw.shuffle(lengths)
        if sum(lengths) <= MOST_ROWS:
            cases.append(Case(kind, tuple(lengths), heads, fp8))
    return cases


def drawn_rows(count: int, seed: int, with_peers: bool) -> Iterator[Row]:
    """Each case as a decode step runs it, by an even split, and by the peers that take it."""
    dtypes = (torch.bfloat16, torch.float8_e4m3fn) if with_peers else ()
    others = {dtype: list(mla.peers(dtype)) for dtype in dtypes}
    for case in drawn_cases(count, seed):
        even = not available() or not pays(len(case.lengths), -(-max(case.lengths) // PAGE) * PAGE, case.heads)
        calls = [("ours", mla.ours)] if even else [("ours", mla.by_plan), ("ours, even split", mla.ours)]
        if case.fp8 and not even:
            calls.append(("ours, e4m3 queries", RoundedQueries()))
        dtype, rows = torch.float8_e4m3fn if case.fp8 else torch.bfloat16, sum(case.lengths)
        moved = rows * ROW * dtype.itemsize + len(case.lengths) * case.heads * (ROW + LATENT) * 2
        flops = 2 * rows * case.heads * (ROW + LATENT)
        layers = mla.ragged_layers(list(case.lengths), case.heads, dtype)
        timers = {who: partial(_time, who, call, layers) for who, call in (*calls, *others.get(dtype, []))}
        for who, microseconds in in_turns(timers).items():
            if math.isfinite(microseconds):
                yield Row("mla_decode", case.name, who, microseconds, moved, flops)


def _time(who: str, call: Callable[[Inputs], Tensor], layers: list[Inputs]) -> float:
    """Microseconds; infinity of a peer that fails, as one that wants more scratch memory than is left."""
    try:
        return mla.time_layers(call, layers, REPLAYS)
    except RuntimeError:
        if who.startswith("ours"):
            raise
        return math.inf
