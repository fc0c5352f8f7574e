"""CUDA graphs of a step: of decodes, of prompts in padded sizes, and of what engines ask for."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kimi_k2.errors import KernelError

# What a capture may end with: no memory left, or a launch that a graph cannot hold.
CANNOT = (RuntimeError, KernelError)

Work = Callable[[], tuple[Tensor, ...]]


class Recorded(NamedTuple):
    """A function's work.

    Attributes:
        replay: repeats it.
        made: what the function returned, which a repetition fills anew.
        reset: gives the graph up.
    """

    replay: Callable[[], Any]
    made: tuple[Tensor, ...]
    reset: Callable[[], Any]


class Captured(NamedTuple):
    """Work that is repeated on other values of what it reads.

    Attributes:
        given: what it reads.
        graph: of it.
    """

    given: tuple[Tensor, ...]
    graph: Recorded

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the work makes of these, which are copied; another call overwrites it."""
        for buffer, new in zip(self.given, inputs, strict=True):
            buffer.copy_(new)
        self.graph.replay()
        return self.graph.made


def give_up(held: MutableMapping[Any, Captured]) -> None:
    """Reset all graphs, and forget them: NCCL ends a group only when none holds launches of it."""
    for captured in held.values():
        captured.graph.reset()
    held.clear()


class Recorder(Protocol):
    """Makes a function's work repeatable."""

    def __call__(self, work: Work) -> Recorded:
        """Record a function, which has run before: what is built or connected at first is outside the graph."""
        ...

    def let_go(self, tensor: Tensor) -> Tensor:
        """The same tensor, whose memory works that are recorded later may take."""
        ...


class GraphRecorder:
    """By CUDA graphs. All share memory, so that none may be replayed while another's results are still to be read.

    Args:
        weak: of `let_go`; None keeps the memory.
    """

    def __init__(self, weak: Callable[[Tensor], Tensor] | None = None) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.weak = weak

    def __call__(self, work: Work) -> Recorded:
        """See `Recorder`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a capture cannot take what the allocator keeps outside its pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            # Other threads, NCCL's watchdog or an engine's, may ask the GPU meanwhile.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                made = work()
            except Exception:
                with suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return Recorded(graph.replay, made, graph.reset)

    def let_go(self, tensor: Tensor) -> Tensor:
        """See `Recorder`."""
        return tensor if self.weak is None else self.weak(tensor)

    def held(self) -> int:
        """Bytes that the graphs' memory takes of PyTorch's allocator."""
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(self.pool))


def on_all_ranks(make: Callable[[], list[Recorded]], agree: Callable[[bool], bool]) -> tuple[list[Recorded], str]:
    """What `make` records, if every rank could; else nothing, and why.

    Graphs of several ranks hold their sums, so that all replay one or none. Nothing of a capture waits for other ranks:
    they meet again behind it.

    Args:
        make: records.
        agree: whether all ranks call it with True.
    """
    made, reason = list[Recorded](), ""
    try:
        made = make()
    except CANNOT as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
    if agree(not reason):
        return made, ""
    for graph in made:
        graph.reset()
    return [], reason or "another rank cannot"
