"""What kernels at LNC=2 share: the halves of the two cores, and sums over both."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl


def share_of(count: int) -> tuple[int, int]:
    """First and number of `count` items that this core takes."""
    cores = nl.num_programs()
    each = (count + cores - 1) // cores
    first = nl.program_id() * each
    return first, min(each, count - first)


def from_other_core(tile: Any, pipe_id: int = 0) -> Any:
    """The other core's tile of the same shape, in SBUF."""
    received = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    other = 1 - nl.program_id()
    nisa.sendrecv(src=tile, dst=received, send_to_rank=other, recv_from_rank=other, pipe_id=pipe_id)
    return received


def add_over_cores(tile: Any, pipe_id: int = 0) -> None:
    """Add the other core's tile to this one, to the same bits on both; nothing at LNC=1."""
    if nl.num_programs() == 1:
        return
    received = from_other_core(tile, pipe_id)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=received, op=nl.add)
