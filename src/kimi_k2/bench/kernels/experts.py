"""Routed experts beside the peers installed, over formats, layouts, routings and numbers of tokens, in one run."""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.bench.kernels.expert_formats import (
    FORMATS,
    HIDDEN,
    Operation,
    RandomExperts,
    Shape,
    distinct,
    draw_inputs,
    drawn,
)
from kimi_k2.bench.kernels.expert_peers import PEERS, Peer, peers
from kimi_k2.bench.kernels.harness import Captures, Case, checked, without
from kimi_k2.bench.kernels.report import Report
from kimi_k2.bench.kernels.routing import Routing
from kimi_k2.bench.kernels.tune import cases
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KernelError

Key = tuple[str, str, str, int]  # format, layout, routing, tokens

# Beside a rank's parts of the model: what FlyDSL's benchmark of W4A16 and BF16 experts has, by its number of experts
# (tests/kernels/bench_moe_w4a16.py of ROCm/FlyDSL: 7168 x 512, 8 a token; published for 512 to 16,384 tokens).
FLYDSL = {f"E{count}": Shape(count, 512, 8) for count in (64, 128, 384)}
LAYOUTS = ("TP8", "EP8", "TP4", "EP4", "TP2", "TP1")
ROUTINGS = ("uniform", "zipf:0.5", "zipf:1.0", "zipf:1.5", "same")
TOKENS = tuple(2**power for power in range(17))
# A run takes every shape to so many tokens before it takes any further.
BANDS = (512, 4096, 16384)
CHECKED_TOKENS = 2
# Two roundings to e4m3 give 4e-2; a call with arguments in a wrong order gives about 1.
MOST_ERROR = 0.1


@dataclass(frozen=True)
class Selection:
    """Which cases to time; within a band of tokens the members' order is the order of the run.

    Attributes:
        drawn: so many cases drawn from the formats, layouts, routings and numbers of tokens up to the most, instead of
            all their combinations; 0 for these. Of a Zipf routing drawn, the exponent is too, up to the one given.
        seed: of the draw.
    """

    formats: Sequence[str] = tuple(PEERS)  # the others by name
    layouts: Sequence[str] = LAYOUTS
    routings: Sequence[str] = ROUTINGS
    tokens: Sequence[int] = TOKENS
    with_peers: bool = True
    drawn: int = 0
    seed: int = 0


def drawn_cases(wanted: Selection) -> list[Key]:
    """`wanted.drawn` different cases, the same for a seed; powers of two of tokens are equally likely."""
    draw = random.Random(wanted.seed)
    kinds = dict.fromkeys(routing.partition(":")[0] for routing in wanted.routings)
    most = max(float(routing.partition(":")[2] or 0) for routing in wanted.routings)
    keys: dict[Key, None] = {}
    while len(keys) < wanted.drawn:
        kind = draw.choice(list(kinds))
        routing = kind if kind != "zipf" else f"zipf:{draw.uniform(0, most):.2f}"
        tokens = round(2 ** draw.uniform(0, math.log2(max(wanted.tokens))))
        keys[draw.choice(wanted.formats), draw.choice(wanted.layouts), routing, tokens] = None
    return list(keys)


class Beside(NamedTuple):
    """What ours is timed beside.

    Attributes:
        peers: held against float64, as ours then is.
        captures: of the cases before, with few replays.
        say: takes a line of why a peer is left out.
    """

    peers: Sequence[Peer]
    captures: Captures
    say: Callable[[str], None]


def errors_of(
    calls: dict[str, Operation],
    experts: RandomExperts,
    inputs: tuple[Tensor, Tensor, Tensor],
    say: Callable[[str], None],
) -> dict[str, float]:
    """How far each is from float64 over the first tokens; of a peer that fails `say` takes why.

    Raises:
        KernelError: a result is not that of the experts.
    """
    few = slice(CHECKED_TOKENS)
    wanted, errors = experts.reference(*(tensor[few] for tensor in inputs)), {}
    for name, call in calls.items():
        try:
            errors[name] = checked(name, call(*inputs)[few], wanted, MOST_ERROR)
        except (RuntimeError, AssertionError) as failure:
            if name == "ours" or isinstance(failure, KernelError):
                raise
            say(without(name, failure))
    return errors


def case_of(
    operation: str,
    experts: RandomExperts,
    top_k: int,
    tokens: int,
    routing: str,
    beside: Beside,
) -> Case:
    """A number of tokens, with the same routings a call for all.

    Args:
        operation: see `harness.Case`.
        beside: peers, graphs and `say`.
    """
    count, inter = experts.shape
    sets = draw_inputs(Shape(count, inter, top_k), Routing.parse(routing), tokens, tokens, experts.bytes_each)
    calls = {"ours": experts.ours()}
    calls |= {peer.name: peer.call for peer in beside.peers if peer.takes(tokens, top_k)}
    errors = errors_of(calls, experts, sets[0], beside.say)
    replays = 6 if tokens <= 64 else 4 if tokens <= 4096 else 2
    return Case(
        operation,
        f"{routing}, T={tokens}",
        {name: [partial(calls[name], *one) for one in sets] for name in errors},
        distinct(sets) * experts.bytes_each + 4 * tokens * HIDDEN,
        6 * tokens * top_k * HIDDEN * inter,
        partial(beside.captures.times, replays=replays, warm_up=int(tokens <= 4096)),
    )


def sections(wanted: Selection) -> Iterator[tuple[str, str, list[tuple[int, str]]]]:
    """The cases, by format and layout: (tokens, routing) within a band, fewest tokens first."""
    standard = product(wanted.formats, wanted.layouts, wanted.routings, wanted.tokens)

    def place(key: Key) -> tuple[int, int, int]:
        name, layout, _, tokens = key
        # Of few drawn cases a format and layout has one band: its weights are made once.
        band = 0 if wanted.drawn else bisect_left(BANDS, tokens)
        return band, wanted.layouts.index(layout), wanted.formats.index(name)

    every = drawn_cases(wanted) if wanted.drawn else standard
    for (_, layout, name), keys in groupby(sorted(every, key=lambda key: (place(key), key[3])), place):
        yield wanted.formats[name], wanted.layouts[layout], [(tokens, routing) for _, _, routing, tokens in keys]


def run(
    config: KimiK2Config,
    wanted: Selection,
    out: Path | None,
    say: Callable[[str], None],
    *,
    seconds: float | None = None,
) -> None:
    """Say a line a row.

    Args:
        config: of the model, for the layouts' shapes.
        wanted: the cases.
        out, say: see `Report`.
        seconds: begin no case after so many; None: time all.

    Raises:
        KernelError: there is no CUDA device, no such format or layout, or an implementation computes something else.
        ConfigError: no such routing.
    """
    until, shapes = time.monotonic() + (math.inf if seconds is None else seconds), cases(config) | FLYDSL
    for kind, names, known in (("format", wanted.formats, FORMATS), ("shape", wanted.layouts, shapes)):
        if unknown := sorted(set(names) - set(known)):
            raise KernelError(f"{kind}: {', '.join(unknown)} not among {', '.join(known)}")
    for routing in wanted.routings:
        Routing.parse(routing)
    report = Report(out, say)
    for name, layout, section in sections(wanted):
        operation, shape = f"{name} {layout}", shapes[layout]
        left = [
            (tokens, routing)
            for tokens, routing in section
            if time.monotonic() < until and report.is_left(operation, f"{routing}, T={tokens}")
        ]
        if not left:
            continue
        experts = drawn(name, shape.experts, shape.inter)
        beside = Beside(list(peers(experts, say)) if wanted.with_peers else [], Captures(), say)
        for tokens, routing in left:
            if time.monotonic() < until:
                report.begin(operation, f"{routing}, T={tokens}")
                report.time(case_of(operation, experts, shape.top_k, tokens, routing, beside))
        del experts, beside
        torch.cuda.empty_cache()
    report.end()
