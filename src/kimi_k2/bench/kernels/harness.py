"""Timing on the GPU: median of CUDA-graph replays over inputs too large together for the L2, and the measured ceilings.

Callers rotate: each call of a graph gets its own inputs, and together they should be several times the 60 MB L2, so
that what a kernel reads comes from memory as it does in a model, where other layers run in between.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from kimi_k2.errors import KernelError

# A case in which ours takes more than so many times the best other's time is timed in so many turns.
SLOWER, TURNS = 1.05, 3


def in_turns(timers: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Microseconds by name, the median of the turns: more than one where ours, named first, is slower than another.

    Each turn begins with another one, as a card that has just worked hard is slower. Names that begin as the first one
    does are other forms of ours; infinity is the time of what failed.
    """
    mine, *others = names = list(timers)
    others = [name for name in others if not name.startswith(mine)]
    times: dict[str, list[float]] = {name: [] for name in names}
    medians: dict[str, float] = {}
    for turn in range(TURNS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timers[name]())
        medians = {name: statistics.median(each) for name, each in times.items()}
        if not others or medians[mine] <= SLOWER * min(medians[name] for name in others):
            break
    return medians


def quick_captures() -> None:
    """Let the garbage collector pass over what is imported by now: it runs at every capture and takes most of one."""
    gc.collect()
    gc.freeze()


def graph_median(calls: Sequence[Callable[[], Any]], replays: int = 25, warm_up: int = 3) -> float:
    """Median of `graph_times`."""
    return statistics.median(graph_times(calls, replays, warm_up))


def graph_times(calls: Sequence[Callable[[], Any]], replays: int = 25, warm_up: int = 3) -> list[float]:
    """Microseconds of one call when `calls` run back to back in one captured CUDA graph, of each replay.

    The first call runs once before the capture, so that a build or a scratch allocation is not captured.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return [time / len(calls) for time in event_times(graph.replay, replays, warm_up)]


class Captures:
    """Captures graphs one after another in memory of their own, which is kept from one to the next.

    `torch.cuda.graph` gives the allocator's caches back at every capture, and getting them again takes longer than
    most of what a benchmark of many cases times.
    """

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # A pool lives as long as a graph in it.
        self._first = self._capture([partial(torch.zeros, 1, device="cuda")])

    def _capture(self, calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        return graph

    def times(self, calls: Sequence[Callable[[], Any]], replays: int, warm_up: int) -> list[float]:
        """Microseconds of one call, of each replay of a graph of all of them; one has run before."""
        graph = self._capture(calls)
        return [time / len(calls) for time in event_times(graph.replay, replays, warm_up)]


def event_times(action: Callable[[], Any], repeats: int, warm_up: int = 3) -> list[float]:
    """Microseconds of each of `repeats` runs of `action` between two events, after `warm_up` runs that do not count."""
    times = []
    for run in range(warm_up + repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        end.synchronize()
        if run >= warm_up:
            times.append(begin.elapsed_time(end) * 1e3)
    return times


def read_bandwidth(size: int = 2**32) -> float:
    """GB/s of the best of eight sums over a buffer of `size` bytes, far larger than the L2."""
    buffer = torch.empty(size // 4, device="cuda")
    return size / min(event_times(buffer.sum, 8, 0)) / 1e3


def matmul_rate(size: int = 8192) -> float:
    """TFLOP/s of the median of ten square BF16 GEMMs of random matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / statistics.median(event_times(lambda: a @ b, 10)) / 1e6


def checked(name: str, got: torch.Tensor, wanted: torch.Tensor, most: float, whose: str = "float64") -> float:
    """How far `got` is from `wanted`.

    Raises:
        KernelError: `most` or more.
    """
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    if not error < most:
        raise KernelError(f"{name}: {error:.1e} from {whose}, expected below {most}")
    return error


class Case(NamedTuple):
    """What is timed for one shape.

    Attributes:
        operation: e.g. "gate".
        name: of the shape, e.g. "384 experts, T=64".
        ways: by implementation the calls of its graph, each with inputs of its own: "ours" first, the others are peers;
            names that begin with "ours" are other forms of ours.
        bytes: the fewest that must move: each input read and each output written once.
        flops: matrix operations, 0 if there are none.
        times: microseconds of a call, of each replay of a graph of such calls; None is `graph_times`.
    """

    operation: str
    name: str
    ways: Mapping[str, Sequence[Callable[[], Any]]]
    bytes: float
    flops: float = 0.0
    times: Callable[[Sequence[Callable[[], Any]]], list[float]] | None = None

    def rows(self, replays: int, say: Callable[[str], None]) -> Iterator[Row]:
        """A row a way, timed in turns; a peer that fails, as for want of scratch memory, has a line of why instead."""
        times, failed = self.times or partial(graph_times, replays=replays), dict[str, Exception]()

        def median(name: str) -> float:
            try:
                return statistics.median(times(self.ways[name]))
            except (RuntimeError, AssertionError) as failure:
                if name.startswith("ours") or isinstance(failure, KernelError):
                    raise
                failed[name] = failure
                return math.inf

        for name, time in in_turns({name: partial(median, name) for name in self.ways}).items():
            if name in failed:
                say(without(name, failed[name]))
            else:
                yield Row(self.operation, self.name, name, time, self.bytes, self.flops)


def without(name: str, failure: Exception) -> str:
    """A line of a peer that has no row."""
    return f"no row of {name}: {type(failure).__name__}: {failure}".splitlines()[0]


@dataclass(frozen=True)
class Row:
    """A timed call: of `Case` its fields, of `implementation` the median of CUDA-graph replays."""

    operation: str
    case: str
    implementation: str
    microseconds: float
    bytes: float
    flops: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Rate at which memory is read and written, in GB/s (10^9 bytes)."""
        return self.bytes / self.microseconds / 1e3

    @property
    def teraflops(self) -> float:
        """Rate of floating-point operations, in TFLOP/s."""
        return self.flops / self.microseconds / 1e6

    def share(self, bandwidth: float, matrix_rate: float) -> float:
        """The larger of the shares of `bandwidth` (GB/s) and of `matrix_rate` (TFLOP/s) that this call reaches."""
        return max(self.gigabytes_per_second / bandwidth, self.teraflops / matrix_rate)
