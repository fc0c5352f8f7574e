"""Routed experts beside the peers installed, over formats, layouts, routings and numbers of tokens, in one run."""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path

import torch
from torch import Tensor

from kimi_k2.bench.kernels import harness
from kimi_k2.bench.kernels.expert_formats import (
    FORMATS,
    HIDDEN,
    Case,
    RandomExperts,
    distinct,
    draw_inputs,
    int4_experts,
    random_int4,
    scales_of_all,
)
from kimi_k2.bench.kernels.expert_peers import Peer, peers
from kimi_k2.bench.kernels.expert_rows import (
    Comparison,
    Key,
    add_row,
    begin_row,
    begun_rows,
    kernel_state,
    read_rows,
    summary,
)
from kimi_k2.bench.kernels.harness import Captures, quick_captures, read_bandwidth
from kimi_k2.bench.kernels.mla_cases import checked
from kimi_k2.bench.kernels.routing import Routing
from kimi_k2.bench.kernels.tune import cases
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KernelError
from kimi_k2.kernels.experts.w4a16_layout import FORMATS as FOUR_BITS

# Beside a rank's parts of the model: what FlyDSL's benchmark of W4A16 and BF16 experts has, by its number of experts
# (tests/kernels/bench_moe_w4a16.py of ROCm/FlyDSL: 7168 x 512, 8 a token; published for 512 to 16,384 tokens).
FLYDSL = {f"E{count}": Case(count, 512, 8) for count in (64, 128, 384)}
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

    formats: Sequence[str] = tuple(FORMATS)
    layouts: Sequence[str] = LAYOUTS
    routings: Sequence[str] = ROUTINGS
    tokens: Sequence[int] = TOKENS
    replays: int | None = None
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


def replays_of(tokens: int) -> int:
    """Replays whose median is taken: few, as a row says how far apart they were."""
    return 6 if tokens <= 64 else 4 if tokens <= 4096 else 2


def compare(
    experts: RandomExperts,
    known: Sequence[Peer],
    case: Case,
    layout: str,
    routing: str,
    tokens: int,
    replays: int,
    captures: Captures | None = None,
) -> Comparison:
    """Time a case.

    Args:
        captures: of the cases before it; None: its own.

    Raises:
        KernelError: an implementation's result is not that of the experts.
    """
    captures = captures or Captures()
    sets = draw_inputs(case, Routing.parse(routing), tokens, tokens, experts.bytes_each)
    few = [part[:CHECKED_TOKENS] for part in sets[0]]
    wanted = experts.reference(few[0], few[1], few[2])
    errors: dict[str, float] = {}
    absent: dict[str, str] = {}
    ways: dict[str, list[Callable[[], Tensor]]] = {}
    for peer in (Peer("ours", experts.ours(tokens, case.top_k)), *known):
        reason = peer.absent(tokens, case.top_k)
        if peer.call is None or reason is not None:
            absent[peer.name] = reason or ""
            continue
        try:
            errors[peer.name] = checked(peer.name, peer.call(*sets[0])[:CHECKED_TOKENS], wanted, MOST_ERROR)
        except (RuntimeError, AssertionError) as failure:
            if peer.name == "ours" or isinstance(failure, KernelError):
                raise
            absent[peer.name] = f"failed: {failure}".splitlines()[0]
            continue
        ways[peer.name] = [partial(peer.call, *one) for one in sets]
    timed = harness.time_ways(ways, partial(captures.times, replays=replays, warm_up=int(tokens <= 4096)))
    reached = distinct(sets)
    return Comparison(
        experts.name, layout, routing, tokens, reached, reached * experts.bytes_each, timed.microseconds, errors,
        absent | timed.failed, timed.spread, kernel_state(experts.name),
    )  # fmt: skip


def sections(wanted: Selection, have: Mapping[Key, Comparison]) -> Iterator[tuple[str, str, list[tuple[int, str]]]]:
    """The cases to time, by format and layout: first those that no row has, then those of other kernels' rows.

    Args:
        have: the rows of runs before; empty for all cases.

    Yields:
        Format, layout, and (tokens, routing) within a band, fewest tokens first.
    """
    standard = product(wanted.formats, wanted.layouts, wanted.routings, wanted.tokens)

    def place(key: Key) -> tuple[bool, int, int, int]:
        name, layout, _, tokens = key
        # Of few drawn cases a format and layout has one band: its weights are made once.
        band = 0 if wanted.drawn else bisect_left(BANDS, tokens)
        return key in have, band, wanted.layouts.index(layout), wanted.formats.index(name)

    left = [
        key
        for key in (drawn_cases(wanted) if wanted.drawn else standard)
        if key not in have or have[key].state != kernel_state(key[0])
    ]
    for (_, _, layout, name), keys in groupby(sorted(left, key=lambda key: (place(key), key[3])), place):
        yield wanted.formats[name], wanted.layouts[layout], [(tokens, routing) for _, _, routing, tokens in keys]


def comparisons(
    config: KimiK2Config,
    wanted: Selection,
    have: Mapping[Key, Comparison],
    deadline: float = math.inf,
    begin: Callable[[Key], None] = lambda key: None,
    without: Collection[Key] = (),
) -> Iterator[Comparison]:
    """Each case of the selection that is left, until `deadline` on the monotonic clock.

    Args:
        begin: told of each case before it is timed.
        without: cases left out.
    """
    shapes = cases(config) | FLYDSL
    for name, layout, left in sections(wanted, have):
        if time.monotonic() > deadline:
            return
        case = shapes[layout]
        experts = FORMATS[name](case.experts, case.inter)
        known, captures = list(peers(experts)) if wanted.with_peers else [], Captures()
        for tokens, routing in left:
            if time.monotonic() > deadline:
                return
            if (name, layout, routing, tokens) in without:
                continue
            begin((name, layout, routing, tokens))
            replays = wanted.replays or replays_of(tokens)
            yield compare(experts, known, case, layout, routing, tokens, replays, captures)
        del experts, known, captures
        torch.cuda.empty_cache()


def run(
    config: KimiK2Config,
    wanted: Selection,
    out: Path | None,
    say: Callable[[str], None],
    *,
    seconds: float | None = None,
) -> None:
    """Say a line a case and a summary.

    Args:
        config: of the model, for the layouts' shapes.
        wanted: the cases.
        out: file of JSON lines, a case each, written as they are found; None for none. Rows that it has are kept: the
            cases that it lacks are timed, then those of other kernels, and all are summed up. A case that a run before
            began and did not end is named and left out: it may have ended that run.
        say: takes each line.
        seconds: begin no case after so many; None: time all.

    Raises:
        KernelError: there is no CUDA device, no such format or layout, an implementation computes something else, or
            `out` holds something else.
        ConfigError: no such routing.
    """
    begun = time.monotonic()
    for kind, names, known in (("format", wanted.formats, FORMATS), ("shape", wanted.layouts, cases(config) | FLYDSL)):
        if unknown := sorted(set(names) - set(known)):
            raise KernelError(f"{kind}: {', '.join(unknown)} not among {', '.join(known)}")
    for routing in wanted.routings:
        Routing.parse(routing)
    have = read_rows(out) if out is not None else {}
    if not torch.cuda.is_available():
        raise KernelError("no CUDA device")
    quick_captures()
    say(f"{torch.cuda.get_device_name()}: read {read_bandwidth():.0f} GB/s")
    ended = begun_rows(out) - have.keys() if out is not None else set()
    for key in sorted(ended):
        say(f"left out, as a run ended in it: {key}")
    rows, until = dict(have), begun + (math.inf if seconds is None else seconds)
    begin: Callable[[Key], None] = partial(begin_row, out) if out is not None else lambda key: None
    for one in comparisons(config, wanted, have, until, begin, ended):
        rows[one.key] = one
        say(one.line())
        if out is not None:
            add_row(out, one)
    for line in summary(list(rows.values())):
        say(line)


def own_cases(
    operation: str, name: str, experts: RandomExperts, top_k: int, counts: Sequence[int], routing: str = "uniform"
) -> Iterator[harness.Case]:
    """For `bench kernels` ours at each number of tokens; the peers stand in `bench experts`."""
    count, inter = experts.shape
    for tokens in counts:
        sets = draw_inputs(Case(count, inter, top_k), Routing.parse(routing), tokens, tokens, experts.bytes_each)
        call = experts.ours(tokens, top_k)
        moved, flops = distinct(sets) * experts.bytes_each + 4 * tokens * HIDDEN, 6 * tokens * top_k * HIDDEN * inter
        ways = {"ours": [partial(call, *one) for one in sets]}
        yield harness.Case(
            operation, f"{name}, T={tokens}{', all to the same' * (routing == 'same')}", ways, moved, flops
        )


def fp8_cases(with_peers: bool) -> Iterator[harness.Case]:
    """FP8 at a rank's shapes, under EP with the pairs of T tokens that arrive; no peer is known here."""
    some, more = (64, 512), (1, 8, 64, 512, 4096)
    for name, case, counts in (
        ("TP8", Case(384, 256, 8), more), ("EP8", Case(48, 2048, 1), more), ("TP4", Case(384, 512, 8), some),
        ("EP4", Case(96, 2048, 2), some),
    ):  # fmt: skip
        experts, name = case.draw(), f"{name}: {case.experts} x {case.inter}"
        yield from own_cases("FP8 experts", name, experts, case.top_k, (*counts, 8192, 16384, 32768))
        yield from own_cases("FP8 experts", name, experts, case.top_k, (16, 64), "same")


def four_bit_cases(with_peers: bool) -> Iterator[harness.Case]:
    """INT4 of a rank of four, then each format at a rank of eight with INT4's tuned choices; no peer is known here."""
    count, top_k = 384, 8
    yield from own_cases(
        "moe_w4a16", "int4, N=512", int4_experts(random_int4(count, 512)), top_k, (1, 8, 64, 512, 16384)
    )
    for kind in FOUR_BITS:
        name = kind.library.rpartition("/")[2].removeprefix("w4a16").strip("_") or "int4"
        experts = int4_experts(random_int4(count, 256, kind=kind), **scales_of_all(count, 256, HIDDEN, kind))
        yield from own_cases("moe_w4a16", f"{name}, N=256", experts, top_k, (1, 4, 16, 64, 128, 256, 1024, 4096))
