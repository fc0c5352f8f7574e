"""Routed experts beside the peers installed, over formats, layouts, routings and numbers of tokens, in one run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kimi_k2.bench.kernels.expert_formats import FORMATS, Operation, RandomExperts
from kimi_k2.bench.kernels.expert_peers import Peer, peers
from kimi_k2.bench.kernels.expert_rows import (
    Comparison,
    Key,
    add_row,
    by_layout,
    kernel_state,
    read_rows,
    summary,
    table,
)
from kimi_k2.bench.kernels.harness import Captures, quick_captures, read_bandwidth
from kimi_k2.bench.kernels.mla_cases import relative
from kimi_k2.bench.kernels.moe import HIDDEN
from kimi_k2.bench.kernels.routing import Routing
from kimi_k2.bench.kernels.tune import Case, cases
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KernelError

LAYOUTS = ("TP8", "EP8", "TP4", "EP4", "TP2", "TP1")
ROUTINGS = ("uniform", "zipf:0.5", "zipf:1.0", "zipf:1.5", "same")
TOKENS = tuple(2**power for power in range(17))
# A run takes every shape to so many tokens before it takes any further.
BANDS = (512, 4096, 16384)
CHECKED_TOKENS = 2
MOVED = 4e8  # bytes that a case's inputs read together at least, or as many sets as there are: several times the L2
# Two roundings to e4m3 give 4e-2; a call with arguments in a wrong order gives about 1.
MOST_ERROR = 0.1


@dataclass(frozen=True)
class Selection:
    """Which cases to time; within a band of tokens the members' order is the order of the run."""

    formats: Sequence[str] = tuple(FORMATS)
    layouts: Sequence[str] = LAYOUTS
    routings: Sequence[str] = ROUTINGS
    tokens: Sequence[int] = TOKENS
    replays: int | None = None
    with_peers: bool = True


def replays_of(tokens: int) -> int:
    """Replays whose median is taken: few, as a row says how far apart they were."""
    return 6 if tokens <= 64 else 4 if tokens <= 4096 else 2


def draw_inputs(
    case: Case, routing: Routing, tokens: int, seed: int, bytes_each: float = 0.0
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens with their routings, int32 indices, so many that what they read does not fit the L2.

    Args:
        bytes_each: of an expert; a token's experts are the least that a call reads.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    sets, enough = [], max(2, math.ceil(MOVED / max(1.0, case.top_k * bytes_each)))
    for _ in range(min(enough, 12 if tokens <= 8 else 6 if tokens <= 512 else 2 if tokens <= 4096 else 1)):
        x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
        indices, weights = routing.draw(tokens, case.top_k, case.experts, generator)
        sets.append((x, indices.int().contiguous(), weights.contiguous()))
    return sets


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
    microseconds, errors, absent, spread = {}, {}, {}, {}
    for peer in (Peer("ours", experts.ours(tokens, case.top_k)), *known):
        reason = peer.absent(tokens, case.top_k)
        if peer.call is None or reason is not None:
            absent[peer.name] = reason or ""
            continue
        call: Operation = peer.call
        try:
            errors[peer.name] = relative(call(*sets[0])[:CHECKED_TOKENS], wanted)
            if not errors[peer.name] < MOST_ERROR:
                raise KernelError(f"{peer.name}: {errors[peer.name]:.1e} from float64, expected below {MOST_ERROR}")
            times = captures.times([partial(call, *one) for one in sets], replays, int(tokens <= 4096))
        except (RuntimeError, AssertionError) as failure:
            if peer.name == "ours" or isinstance(failure, KernelError):
                raise
            absent[peer.name] = f"failed: {failure}".splitlines()[0]
            continue
        microseconds[peer.name] = statistics.median(times)
        spread[peer.name] = round((max(times) - min(times)) / microseconds[peer.name], 4)
    distinct = statistics.mean(indices.unique().numel() for _, indices, _ in sets)
    return Comparison(
        experts.name,
        layout,
        routing,
        tokens,
        distinct,
        distinct * experts.bytes_each,
        microseconds,
        errors,
        absent,
        spread,
        kernel_state(experts.name),
    )


def sections(wanted: Selection, have: Mapping[Key, Comparison]) -> Iterator[tuple[str, str, list[tuple[int, str]]]]:
    """The cases to time, by format and layout: first those that no row has, then those of other kernels' rows.

    Args:
        have: the rows of runs before; empty for all cases.

    Yields:
        Format, layout, and (tokens, routing) within a band, fewest tokens first.
    """
    states = {name: kernel_state(name) for name in wanted.formats}
    for begun in (False, True):
        for least, most in zip((0, *BANDS), (*BANDS, math.inf), strict=True):
            for layout in wanted.layouts:
                for name in wanted.formats:
                    keys = [
                        (name, layout, routing, tokens)
                        for tokens in sorted(wanted.tokens)
                        if least < tokens <= most
                        for routing in wanted.routings
                    ]
                    left = [key for key in keys if (key in have) == begun]
                    left = [key for key in left if not begun or have[key].state != states[name]]
                    if left:
                        yield name, layout, [(tokens, routing) for _, _, routing, tokens in left]


def comparisons(
    config: KimiK2Config, wanted: Selection, have: Mapping[Key, Comparison], deadline: float = math.inf
) -> Iterator[Comparison]:
    """Each case of the selection that is left, until `deadline` on the monotonic clock."""
    shapes = cases(config)
    for name, layout, left in sections(wanted, have):
        if time.monotonic() > deadline:
            return
        case = shapes[layout]
        experts = FORMATS[name].draw(case.experts, case.inter)
        known, captures = list(peers(experts)) if wanted.with_peers else [], Captures()
        for tokens, routing in left:
            if time.monotonic() > deadline:
                return
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
    resume: bool = False,
    seconds: float | None = None,
) -> None:
    """Say a line a case and a summary.

    Args:
        config: of the model, for the layouts' shapes.
        wanted: the cases.
        out: file of JSON lines, a case each, written as they are found; None for none.
        say: takes each line.
        resume: keep the rows of `out`, time the cases that it lacks, then those of other kernels, and sum up all.
        seconds: begin no case after so many; None: time all.

    Raises:
        KernelError: there is no CUDA device, no such format or layout, an implementation computes something else, or
            `out` holds something else.
        ConfigError: no such routing.
    """
    begun = time.monotonic()
    for kind, given, known in (("format", wanted.formats, FORMATS), ("shape", wanted.layouts, cases(config))):
        if unknown := sorted(set(given) - set(known)):
            raise KernelError(f"{kind}: {', '.join(unknown)} not among {', '.join(known)}")
    for routing in wanted.routings:
        Routing.parse(routing)
    have = read_rows(out) if resume and out is not None else {}
    if not torch.cuda.is_available():
        raise KernelError("no CUDA device")
    quick_captures()
    say(f"{torch.cuda.get_device_name()}: read {read_bandwidth():.0f} GB/s")
    if out is not None and not resume:
        out.unlink(missing_ok=True)
    found = dict(have)
    for one in comparisons(config, wanted, have, begun + (math.inf if seconds is None else seconds)):
        found[one.key] = one
        say(one.line())
        if out is not None:
            add_row(out, one)
    rows = list(found.values())
    for line in (*by_layout(rows), *summary(rows), *table(rows)):
        say(line)
