"""Float32 activations beside narrower weights: the Tensor Engine takes them as BF16 columns, value and remainders.

A matmul of few columns costs 64 cycles whatever they are, so for few tokens the other columns cost nothing there.
Two columns hold 17 bits of a value, three all 24.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl


def parts_of(values: Any, weight_bytes: int, most: int = 2) -> int:
    """`most` where values are float32 and a weight's elements have fewer bytes, else 1."""
    return most if values.itemsize == 4 and weight_bytes < 4 else 1


def in_parts(values: Any, weight_bytes: int, most: int = 2) -> Any:
    """Values [P, n, T] in SBUF as [P, n, T, parts], which add up to them; BF16 where there are several."""
    count = parts_of(values, weight_bytes, most)
    if count == 1:
        return values.expand_dim(3)
    parts = nl.ndarray((*values.shape, count), dtype=nl.bfloat16, buffer=nl.sbuf)
    rest = values
    for part in range(count - 1):
        nisa.tensor_copy(dst=parts[:, :, :, part], src=rest)
        last = part == count - 2
        left = parts[:, :, :, part + 1] if last else nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=left, data1=rest, data2=parts[:, :, :, part], op=nl.subtract)
        rest = left
    return parts


def joined(sums: Any, parts: int) -> Any:
    """Sums [P, n, T * parts] over the parts: float32 [P, n, T] in SBUF."""
    if parts == 1:
        return sums
    rows, count, tokens = sums.shape
    total = nl.ndarray((rows, count, tokens // parts), dtype=nl.float32, buffer=nl.sbuf)
    by_part = sums.reshape((rows, count, tokens // parts, parts))
    nisa.tensor_reduce(dst=total, op=nl.add, data=by_part, axis=3)
    return total
