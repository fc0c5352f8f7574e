"""What NKI has from 0.5 on alone, of what 0.3 has: sizes of dtypes, and views by `ap`.

`ap` is called on whole tensors: its offset counts from the storage in some releases, from the slice in others.
"""

from __future__ import annotations

from typing import Any

import nki.language as nl


def bytes_of(dtype: Any) -> int:
    """Bytes of an element."""
    if dtype == nl.float32 or dtype == nl.int32 or dtype == nl.uint32:
        return 4
    if dtype == nl.bfloat16 or dtype == nl.float16:
        return 2
    return 1


def stretched(tensor: Any, count: int) -> Any:
    """A whole tensor [P, n, 1] as [P, n, count]."""
    rows, size = tensor.shape[0], tensor.shape[1]
    return tensor.ap(pattern=[[size, rows], [1, size], [0, count]])


def spread(tensor: Any, count: int) -> Any:
    """A whole tensor [P, n] as [P, count, n]."""
    rows, size = tensor.shape[0], tensor.shape[1]
    return tensor.ap(pattern=[[size, rows], [0, count], [1, size]])


def swapped(tensor: Any, count: int) -> Any:
    """The first `count` of n in a whole tensor [P, n, m]: [P, m, count]."""
    rows, size, inner = tensor.shape[0], tensor.shape[1], tensor.shape[2]
    return tensor.ap(pattern=[[size * inner, rows], [1, inner], [inner, count]])


def on_partitions(row: Any, count: int, width: int, offset: int = 0) -> Any:
    """`width` values of a tensor in HBM from `offset` on, read once for each of `count` partitions: [count, width]."""
    return row.ap(pattern=[[0, count], [1, width]], offset=offset)
