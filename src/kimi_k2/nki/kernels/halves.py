"""Float32 activations beside narrower weights: the Tensor Engine takes them as two BF16 columns, value and remainder.

A matmul of few columns costs 64 cycles whatever they are, so for few tokens the second column costs nothing there.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl


def parts_of(values: Any, weight_bytes: int) -> int:
    """2 where values are float32 and a weight's elements have fewer bytes, else 1."""
    return 2 if values.itemsize == 4 and weight_bytes < 4 else 1


def in_parts(values: Any, weight_bytes: int) -> Any:
    """Values [P, n, T] in SBUF as [P, n, T, parts], which add up to them; BF16 where there are two."""
    if parts_of(values, weight_bytes) == 1:
        return values.expand_dim(3)
    halves = nl.ndarray((*values.shape, 2), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=halves[:, :, :, 0], src=values)
    nisa.tensor_tensor(dst=halves[:, :, :, 1], data1=values, data2=halves[:, :, :, 0], op=nl.subtract)
    return halves


def joined(sums: Any, parts: int) -> Any:
    """Sums [P, n, T * parts] over the parts: float32 [P, n, T] in SBUF."""
    if parts == 1:
        return sums
    rows, count, tokens = sums.shape
    total = nl.ndarray((rows, count, tokens // parts), dtype=nl.float32, buffer=nl.sbuf)
    by_part = sums.reshape((rows, count, tokens // parts, parts))
    nisa.tensor_reduce(dst=total, op=nl.add, data=by_part, axis=3)
    return total
