"""Trainium2's e4m3: the bits of e4m3fn, but codes whose exponent bits are all ones (256 to 448, NaN) read as NaN.

The largest value is 240. Halving the codes of a block and doubling its scale leaves nothing above 224 and is exact,
but for values below 2^-5 with an odd lowest bit, which the subnormals cannot hold at half their size.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEURON_E4M3_MAX = 240.0
_EXPONENT = 0x78
_NAN = 0x7F
# Magnitude codes below this are multiples of 2^-9, as are their halves if they are even.
_LINEAR = 16


def _halving_table() -> bytes:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return bytes((codes.to(torch.float32) * 0.5).to(torch.float8_e4m3fn).view(torch.uint8).tolist())


_HALVED = _halving_table()


def reserved_codes(weight: Tensor) -> int:
    """Number of codes of a float8_e4m3fn tensor that Trainium2 reads as NaN."""
    return int(((weight.view(torch.uint8) & _EXPONENT) == _EXPONENT).sum())


def halve_codes(weight: Tensor) -> Tensor:
    """Half of each value, rounded to nearest even; the scale that belongs to it must be doubled.

    Args:
        weight: float8_e4m3fn, any shape.

    Returns:
        float8_e4m3fn, same shape, contiguous; at most 224 in magnitude.

    Raises:
        ValueError: the weight holds NaN.
    """
    codes = weight.contiguous().view(torch.uint8)
    if bool(((codes & _NAN) == _NAN).any()):
        raise ValueError("weight: holds NaN")
    # bytes.translate is several times faster than a round trip through float32.
    halved = bytearray(codes.numpy().tobytes().translate(_HALVED))
    return torch.frombuffer(halved, dtype=torch.uint8).view(weight.shape).view(torch.float8_e4m3fn)


def inexact_codes(weight: Tensor) -> Tensor:
    """Which values of a float8_e4m3fn tensor `halve_codes` has to round: bool, same shape."""
    magnitude = weight.view(torch.uint8) & _NAN
    return (magnitude < _LINEAR) & ((magnitude & 1) == 1)
