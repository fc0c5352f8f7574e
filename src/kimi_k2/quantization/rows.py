"""Matrices worked on a few rows at a time, as many as a core's cache holds, in scratch memory that is used again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

# Values that are worked on at a time: float32, they stay in a core's cache; fewer, and threads wait for one another.
CHUNK_VALUES = 2**19


class _Buffers(threading.local):
    """A thread's scratch memory: fresh pages for every matrix would take longer than the arithmetic."""

    def __init__(self) -> None:
        self.by_use: dict[tuple[int, torch.device], Tensor] = {}


_BUFFERS = _Buffers()


def work_rows(use: int, rows: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Scratch [rows, columns of `like`] on its device, the thread's own; the next call with the same `use` gets it too.

    What is larger than a chunk is not kept.
    """
    columns = like.shape[1]
    if rows * columns > CHUNK_VALUES:
        return torch.empty(rows, columns, dtype=dtype, device=like.device)
    key = (use, like.device)
    if key not in _BUFFERS.by_use:
        # Made in inference mode it could be written in inference mode only.
        with torch.inference_mode(False):
            _BUFFERS.by_use[key] = torch.empty(CHUNK_VALUES, dtype=dtype, device=like.device)
    return _BUFFERS.by_use[key][: rows * columns].view(rows, columns)


def new_matrix(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialized, on the CPU, in NumPy's memory: huge pages, which spare a fault for every 4 KB of it."""
    integers = {1: np.uint8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.empty(tuple(shape), dtype=integers)).view(dtype)


def row_chunks(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of [N, K] in float32 with where they lie."""
    step = max(1, CHUNK_VALUES // rows.shape[1])
    for first in range(0, rows.shape[0], step):
        part = slice(first, first + step)
        yield part, rows[part].to(torch.float32)
