"""Tensors worked on a part at a time, as much as a core's cache holds: rows in scratch memory, the search for NaN."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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
        where = slice(first, first + step)
        yield where, rows[where].to(torch.float32)


class _Bits(NamedTuple):
    """Integers as wide as a float type, and the smallest positive pattern that is no finite number."""

    signed: type[np.signedinteger[Any]]
    unsigned: type[np.unsignedinteger[Any]]
    first: int


_BITS: dict[torch.dtype, _Bits] = {
    torch.float8_e4m3fn: _Bits(np.int8, np.uint8, 0x7F),  # NaN alone: the format has no Inf
    torch.float8_e5m2: _Bits(np.int8, np.uint8, 0x7C),
    torch.float16: _Bits(np.int16, np.uint16, 0x7C00),
    torch.bfloat16: _Bits(np.int16, np.uint16, 0x7F80),
    torch.float32: _Bits(np.int32, np.uint32, 0x7F800000),
    torch.float64: _Bits(np.int64, np.uint64, 0x7FF0000000000000),
}


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor on the CPU holds neither NaN nor Inf; integers never do. Reads at memory speed, copies nothing.

    Patterns of NaN and Inf are the largest of all: of the positive numbers as signed integers, of the negative ones as
    unsigned integers.
    """
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        return True
    sign = 1 << (8 * tensor.dtype.itemsize - 1)
    for chunk in _parts(tensor):
        if chunk.view(bits.signed).max() >= bits.first or chunk.view(bits.unsigned).max() >= bits.first + sign:
            return False
    return True


def _parts(tensor: Tensor) -> Iterator[npt.NDArray[np.uint8]]:
    if not tensor.numel():
        return
    flat = tensor.contiguous().flatten().view(torch.uint8).numpy()
    for start in range(0, len(flat), CHUNK_VALUES):
        yield flat[start : start + CHUNK_VALUES]


def nonfinite(tensor: Tensor) -> str | None:
    """How many NaN and Inf a tensor holds and where the first is, or None if there are none."""
    if is_finite(tensor):
        return None
    wide = tensor.to(torch.float32)
    nans, infs = int(wide.isnan().sum()), int(wide.isinf().sum())
    first = (~wide.isfinite()).nonzero()[0].tolist()
    counts = " and ".join(f"{count} {kind}" for count, kind in ((nans, "NaN"), (infs, "Inf")) if count)
    return f"{counts} among {tensor.numel()} values, the first at {first}"
