"""Float32 activations beside narrower weights: the Tensor Engine takes them as BF16 columns, value and remainders.

A matmul of few columns costs 64 cycles whatever they are, so for few tokens the other columns cost nothing there.
Two columns hold 17 bits of a value, three all 24.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.views import bytes_of


def parts_of(values: Any, weight: Any, most: int = 2) -> int:
    """`most` where values are float32 and a weight's elements have fewer bytes, else 1."""
    return most if bytes_of(values.dtype) == 4 and bytes_of(weight.dtype) < 4 else 1


def in_parts(values: Any, count: int) -> Any:
    """Float32 values [P, n, T] in SBUF as BF16 [P, n, T, count], which add up to them; count 2 or more."""
    rows, size, tokens = values.shape
    parts = nl.ndarray((rows, size, tokens, count), dtype=nl.bfloat16, buffer=nl.sbuf)
    rest = values
    for part in range(count - 1):
        nisa.tensor_copy(dst=parts[:, :, :, part], src=rest)
        left = parts[:, :, :, part + 1]
        if part < count - 2:
            left = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=left, data1=rest, data2=parts[:, :, :, part], op=nl.subtract)
        rest = left
    return parts


def joined(sums: Any, parts: int) -> Any:
    """Sums [P, n, T * parts] over the parts: float32 [P, n, T] in SBUF."""
    rows, count, tokens = sums.shape
    total = nl.ndarray((rows, count, tokens // parts), dtype=nl.float32, buffer=nl.sbuf)
    by_part = sums.reshape((rows, count, tokens // parts, parts))
    nisa.tensor_reduce(dst=total, op=nl.add, data=by_part, axis=3)
    return total
