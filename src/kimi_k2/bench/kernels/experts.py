"""Routed experts beside the peers installed, over formats, layouts, routings and numbers of tokens, in one run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kimi_k2.bench.kernels.expert_formats import FORMATS, Operation, RandomExperts
from kimi_k2.bench.kernels.expert_peers import Peer, peers
from kimi_k2.bench.kernels.harness import graph_median, quick_captures, read_bandwidth
from kimi_k2.bench.kernels.mla_cases import relative
from kimi_k2.bench.kernels.moe import HIDDEN
from kimi_k2.bench.kernels.routing import Routing
from kimi_k2.bench.kernels.tune import Case, cases
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KernelError

LAYOUTS = ("TP8", "EP8", "TP4", "EP4", "TP2", "TP1")
ROUTINGS = ("uniform", "zipf:0.5", "zipf:1.0", "zipf:1.5", "same")
TOKENS = tuple(2**power for power in range(17))
CHECKED_TOKENS = 4
MOVED = 1e9  # bytes that a case's inputs read together at least, or as many sets as there are
# Two roundings to e4m3 give 4e-2; a call with arguments in a wrong order gives about 1.
MOST_ERROR = 0.1


@dataclass(frozen=True)
class Selection:
    """Which cases to time; the members' order is the order of the run."""

    formats: Sequence[str] = tuple(FORMATS)
    layouts: Sequence[str] = LAYOUTS
    routings: Sequence[str] = ROUTINGS
    tokens: Sequence[int] = TOKENS
    replays: int | None = None
    with_peers: bool = True


@dataclass(frozen=True)
class Comparison:
    """A case's medians.

    Attributes:
        experts: distinct ones that a call reads, the mean over its routings.
        microseconds: by implementation, "ours" first.
        errors: by implementation, distance to float64 over the first tokens.
        bytes: of the weights of these experts.
        absent: by peer, why it was not timed.
    """

    format: str
    layout: str
    routing: str
    tokens: int
    experts: float
    bytes: float
    microseconds: dict[str, float]
    errors: dict[str, float]
    absent: dict[str, str]

    @property
    def ratio(self) -> float | None:
        """Our time over the best peer's; None without a peer."""
        others = [value for name, value in self.microseconds.items() if name != "ours"]
        return self.microseconds["ours"] / min(others) if others else None

    def line(self) -> str:
        """One line: ours, and each peer with our time over its time."""
        ours = self.microseconds["ours"]
        told = [f"ours {ours:.1f} us ({self.bytes / ours / 1e3:.0f} GB/s, error {self.errors['ours']:.1e})"]
        for name, value in self.microseconds.items():
            if name != "ours":
                told.append(f"{name} {value:.1f} us (error {self.errors[name]:.1e}), ratio {ours / value:.3f}")
        told += [f"{name} {reason}" for name, reason in self.absent.items()]
        head = f"{self.format} {self.layout} {self.routing} T={self.tokens}, {self.experts:.0f} experts"
        return f"{head}: {'; '.join(told)}"


def replays_of(tokens: int) -> int:
    """Replays whose median is taken."""
    return 25 if tokens <= 512 else 9 if tokens <= 4096 else 5


def draw_inputs(
    case: Case, routing: Routing, tokens: int, seed: int, bytes_each: float = 0.0
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens with their routings, int32 indices, so many that what they read does not fit the L2.

    Args:
        bytes_each: of an expert; a token's experts are the least that a call reads.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    sets, enough = [], max(2, math.ceil(MOVED / max(1.0, case.top_k * bytes_each)))
    for _ in range(min(enough, 24 if tokens <= 8 else 6 if tokens <= 512 else 2)):
        x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
        indices, weights = routing.draw(tokens, case.top_k, case.experts, generator)
        sets.append((x, indices.int().contiguous(), weights.contiguous()))
    return sets


def compare(
    experts: RandomExperts, known: Sequence[Peer], case: Case, layout: str, routing: str, tokens: int, replays: int
) -> Comparison:
    """Time a case.

    Raises:
        KernelError: an implementation's result is not that of the experts.
    """
    sets = draw_inputs(case, Routing.parse(routing), tokens, tokens, experts.bytes_each)
    few = [part[:CHECKED_TOKENS] for part in sets[0]]
    wanted = experts.reference(few[0], few[1], few[2])
    microseconds, errors, absent = {}, {}, {}
    for peer in (Peer("ours", experts.ours(tokens, case.top_k)), *known):
        if peer.call is None or tokens < peer.least:
            absent[peer.name] = peer.reason or f"not timed below {peer.least} tokens"
            continue
        call: Operation = peer.call
        try:
            errors[peer.name] = relative(call(*sets[0])[:CHECKED_TOKENS], wanted)
            if not errors[peer.name] < MOST_ERROR:
                raise KernelError(f"{peer.name}: {errors[peer.name]:.1e} from float64, expected below {MOST_ERROR}")
            microseconds[peer.name] = graph_median([partial(call, *one) for one in sets], replays, min(3, replays))
        except (RuntimeError, AssertionError) as failure:
            if peer.name == "ours" or isinstance(failure, KernelError):
                raise
            absent[peer.name] = f"failed: {failure}".splitlines()[0]
    distinct = statistics.mean(indices.unique().numel() for _, indices, _ in sets)
    return Comparison(
        experts.name, layout, routing, tokens, distinct, distinct * experts.bytes_each, microseconds, errors, absent
    )


def comparisons(config: KimiK2Config, wanted: Selection) -> Iterator[Comparison]:
    """Each case of the selection."""
    shapes = cases(config)
    for layout in wanted.layouts:
        for name in wanted.formats:
            case = shapes[layout]
            experts = FORMATS[name].draw(case.experts, case.inter)
            known = list(peers(experts)) if wanted.with_peers else []
            for tokens in wanted.tokens:
                for routing in wanted.routings:
                    replays = wanted.replays or replays_of(tokens)
                    yield compare(experts, known, case, layout, routing, tokens, replays)
            del experts, known
            torch.cuda.empty_cache()


def summary(found: Sequence[Comparison]) -> Iterator[str]:
    """Our time over the best peer's, by format."""
    for name in dict.fromkeys(one.format for one in found):
        ratios = sorted((one.ratio, one.line()) for one in found if one.format == name and one.ratio is not None)
        if not ratios:
            continue
        values = [ratio for ratio, _ in ratios]
        slower = sum(value > 1.05 for value in values)
        yield (
            f"{name}: {len(values)} cases, ours over the best peer: median {statistics.median(values):.3f},"
            f" largest {values[-1]:.3f}, above 1.05 in {slower}"
        )
        yield from (f"  {line}" for ratio, line in ratios[::-1] if ratio > 1.05)


def by_layout(found: Sequence[Comparison]) -> Iterator[str]:
    """Of each format and layout the largest of our times over the best peer's, and how many token counts it has."""
    for name, layout in dict.fromkeys((one.format, one.layout) for one in found):
        mine = [one for one in found if (one.format, one.layout) == (name, layout) and one.ratio is not None]
        if mine:
            largest = max(mine, key=lambda one: one.ratio or 0.0)
            yield (
                f"{name} {layout}: {len(mine)} cases over {len({one.tokens for one in mine})} token counts, largest"
                f" {largest.ratio:.3f} ({largest.routing}, T={largest.tokens})"
            )


def run(config: KimiK2Config, wanted: Selection, out: Path | None, say: Callable[[str], None]) -> None:
    """Say a line a case and a summary.

    Args:
        config: of the model, for the layouts' shapes.
        wanted: the cases.
        out: file of JSON lines, a case each, written as they are found; None for none.
        say: takes each line.

    Raises:
        KernelError: there is no CUDA device, no such format or layout, or an implementation computes something else.
        ConfigError: no such routing.
    """
    for kind, given, known in (("format", wanted.formats, FORMATS), ("shape", wanted.layouts, cases(config))):
        if unknown := sorted(set(given) - set(known)):
            raise KernelError(f"{kind}: {', '.join(unknown)} not among {', '.join(known)}")
    for routing in wanted.routings:
        Routing.parse(routing)
    if not torch.cuda.is_available():
        raise KernelError("no CUDA device")
    quick_captures()
    say(f"{torch.cuda.get_device_name()}: read {read_bandwidth():.0f} GB/s")
    found = []
    if out is not None:
        out.unlink(missing_ok=True)
    for one in comparisons(config, wanted):
        found.append(one)
        say(one.line())
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
    for line in (*by_layout(found), *summary(found)):
        say(line)
