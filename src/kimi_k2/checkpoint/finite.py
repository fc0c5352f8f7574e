"""Whether a stored tensor holds NaN or Inf, found at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# A part is read twice; the second time it comes from a core's cache.
_CHUNK_BYTES = 2**19


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
    for part in _parts(tensor):
        if part.view(bits.signed).max() >= bits.first or part.view(bits.unsigned).max() >= bits.first + sign:
            return False
    return True


def _parts(tensor: Tensor) -> Iterator[npt.NDArray[np.uint8]]:
    if not tensor.numel():
        return
    flat = tensor.contiguous().flatten().view(torch.uint8).numpy()
    for start in range(0, len(flat), _CHUNK_BYTES):
        yield flat[start : start + _CHUNK_BYTES]


def nonfinite(tensor: Tensor) -> str | None:
    """How many NaN and Inf a tensor holds and where the first is, or None if there are none."""
    if is_finite(tensor):
        return None
    wide = tensor.to(torch.float32)
    nans, infs = int(wide.isnan().sum()), int(wide.isinf().sum())
    first = (~wide.isfinite()).nonzero()[0].tolist()
    found = " and ".join(f"{count} {what}" for count, what in ((nans, "NaN"), (infs, "Inf")) if count)
    return f"{found} among {tensor.numel()} values, the first at {first}"
