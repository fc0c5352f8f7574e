"""Two pieces of work beside each other: one on a second CUDA stream, forked from the current one and joined to it."""

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


def beside(aside: Callable[[], S], here: Callable[[], T], device: torch.device, priority: int = 0) -> tuple[S, T]:
    """Results of both: of `aside` on a second stream, of `here` on the current one, which then waits for `aside`.

    The memory of `aside`'s result belongs to the second stream, whose next work takes it once the last reference is
    gone. Launch by launch this may be the work of a fork from a third stream, which does not wait for the current one.
    So the memory is held until the current stream has read it (`record_stream`).

    Inside a capture it is not held. There all forks are the current stream's own, and each waits for everything before
    it, so nothing is overwritten before it is read. To hold it would cost memory: while a capture is under way the
    allocator gives held memory to nobody, and the graph of a prompt would have every layer's result beside the others.

    Args:
        aside: launched first; writes nothing that `here` touches.
        here: what runs beside it.
        device: of both. Without CUDA one runs after the other.
        priority: of the second stream, -1 if its blocks go first. A fork within `here` needs another priority, or it
            waits for `aside`.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return aside(), here()
    main = torch.cuda.current_stream(device)
    side = _side_stream(main.device_index, priority)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            result, captured = aside(), torch.cuda.is_current_stream_capturing()
        other = here()
    finally:
        main.wait_stream(side)
    if result is not None and not captured:
        result.record_stream(main)
    return result, other
