"""Work on a second CUDA stream, forked from the current one, beside what that goes on with until it joins it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

S = TypeVar("S", bound=Tensor | None)
T = TypeVar("T")


@functools.cache
def _side_stream(device_index: int, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index, priority=priority)


def fork(work: Callable[[], S], device: torch.device, priority: int = 0) -> Callable[[], S]:
    """Begin work on a second stream, where the current one is; what joins it gives the result.

    The memory of the result belongs to the second stream, whose next work takes it once the last reference is
    gone. Launch by launch this may be the work of a fork from a third stream, which does not wait for the current one.
    So the memory is held until the current stream has read it (`record_stream`).

    Inside a capture it is not held. There all forks are the current stream's own, and each waits for everything before
    it, so nothing is overwritten before it is read. To hold it would cost memory: while a capture is under way the
    allocator gives held memory to nobody, and the graph of a prompt would have every layer's result beside the others.

    Args:
        work: launched at once; writes nothing that is touched before it is joined.
        device: of it. Without CUDA it runs at once.
        priority: of the second stream, -1 if its blocks go first. A fork meanwhile needs another priority, or it waits
            for this one.

    Returns:
        Of which the first call lets the current stream wait.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        done = work()
        return lambda: done
    main = torch.cuda.current_stream(device)
    side = _side_stream(main.device_index, priority)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            result, captured = work(), torch.cuda.is_current_stream_capturing()
    except BaseException:
        main.wait_stream(side)  # else a capture could not end
        raise

    @functools.cache
    def joined() -> S:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        if result is not None and not captured:
            result.record_stream(current)
        return result

    return joined


def beside(aside: Callable[[], S], here: Callable[[], T], device: torch.device, priority: int = 0) -> tuple[S, T]:
    """Results of both: of `aside`, which is forked, and of `here` on the current stream, which then joins it."""
    joined = fork(aside, device, priority)
    try:
        other = here()
    finally:
        result = joined()
    return result, other
