"""Four-bit floats (OCP Microscaling Formats, e2m1): a sign, two bits of exponent, one of mantissa; two in a byte.

The first of two neighbours along the input dimension has the low half of the byte.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

E2M1_MAX = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)])
# Half way between neighbours; a tie goes to the even code, so that an odd code ends before it and an even one behind.
_MIDPOINTS = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES)])


def unpack_e2m1(packed: Tensor) -> Tensor:
    """float32 [..., N, K] of uint8 [..., N, K / 2]."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return _VALUES.to(packed.device)[codes.to(torch.int32)]


def pack_e2m1(values: Tensor) -> Tensor:
    """uint8 [..., N, K / 2] of floats [..., N, K], rounded to nearest, ties to even; beyond 6 it is 6."""
    magnitude = values.abs().to(torch.float32)
    up = torch.bucketize(magnitude, _MIDPOINTS.to(values.device), right=True)
    down = torch.bucketize(magnitude, _MIDPOINTS.to(values.device))
    code = torch.where(up % 2 == 0, up, down).to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)
