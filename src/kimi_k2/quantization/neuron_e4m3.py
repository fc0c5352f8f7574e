"""Trainium2's e4m3: the bits of e4m3fn, but codes whose exponent bits are all ones (256 to 448, NaN) read as NaN.

The largest value is 240. Halving the codes of a block and doubling its scale leaves nothing above 224 and is exact,
but for values below 2^-5 with an odd lowest bit, which the subnormals cannot hold at half their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kimi_k2.quantization.fp8_block import expand_block_scale
from kimi_k2.quantization.rows import is_finite, new_matrix, work_rows

NEURON_E4M3_MAX = 240.0
_EXPONENT = 0x78
_NAN = 0x7F
_MANTISSA_BITS = 3
# Codes below 16, without their sign, are multiples of 2^-9, as are their halves if they are even;
# of the exponent they have only this bit.
_LINEAR_BITS = 0x08
# Values that are worked on at a time stay in a core's cache.
_CHUNK = 2**18


def _halving_table() -> npt.NDArray[np.uint8]:
    codes = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn)
    halved: npt.NDArray[np.uint8] = (codes.to(torch.float32) * 0.5).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return halved


_HALVED = _halving_table()


def _halve(weight: Tensor) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """Half of each value, at most 224, rounded to nearest even, and where in the flattened tensor it rounds.

    NaN is kept.
    """
    flat = weight.contiguous().view(-1)
    values = flat.view(torch.uint8).numpy()
    out = np.empty_like(values)
    exponents = np.empty(min(_CHUNK, len(values)), dtype=np.uint8)
    inexact = [np.empty(0, dtype=np.int64)]
    for first in range(0, len(values), _CHUNK):
        chunk, halved = values[first : first + _CHUNK], out[first : first + _CHUNK]
        # An exponent less by one; the few values without one to lose, and NaN, are looked up.
        np.subtract(chunk, 1 << _MANTISSA_BITS, out=halved)
        upper = np.bitwise_and(chunk, _EXPONENT & ~_LINEAR_BITS, out=exponents[: len(chunk)])
        if not is_finite(flat[first : first + _CHUNK]):
            upper[(chunk & _NAN) == _NAN] = 0
        if np.count_nonzero(upper) < len(chunk):
            few = np.flatnonzero(upper == 0)
            codes = chunk[few]
            halved[few] = _HALVED[codes]
            inexact.append(few[((codes & 1) == 1) & ((codes & _NAN) != _NAN)] + first)
    return torch.from_numpy(out).view(weight.shape).view(torch.float8_e4m3fn), np.concatenate(inexact)


class HalvedBlocks(NamedTuple):
    """What `halve_blocks` makes.

    Attributes:
        weight: float8_e4m3fn [N, K].
        scale: float32, one a block.
        inexact: where in the flattened weight the halves are rounded.
    """

    weight: Tensor
    scale: Tensor
    inexact: npt.NDArray[np.int64]


def halve_blocks(
    weight: Tensor,
    weight_scale_inv: Tensor,
    block_size: tuple[int, int],
    block: int | tuple[int, int],
) -> HalvedBlocks:
    """A block-FP8 weight for Trainium2: halved codes, doubled scales, each scale repeated for blocks of `block`.

    Args:
        weight: float8_e4m3fn [N, K]; the last blocks of rows and columns may be part empty.
        weight_scale_inv: float32, one scale a block of `block_size`.
        block_size: the checkpoint's block; `block` divides both sides.
        block: of the result, rows and columns or the side of a square. They divide the checkpoint's, so that a rank's
            slice begins and ends on a block's border.
    """
    sides = (block, block) if isinstance(block, int) else block
    grid = torch.Size(-(-size // side) for size, side in zip(weight.shape, sides, strict=True))
    repeats = (block_size[0] // sides[0], block_size[1] // sides[1])
    halved, inexact = _halve(weight)
    doubled = expand_block_scale(weight_scale_inv.to(torch.float32), grid, repeats) * 2.0
    return HalvedBlocks(halved, doubled, inexact)


Observer = Callable[[Tensor, Tensor, Tensor], None]


def quantize_chunks(
    shape: torch.Size, chunks: Iterable[tuple[slice, Tensor]], observe: Observer | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize with scale = amax / 240 a row, round to nearest even; a row of zeros gets scale 1.

    Args:
        shape: [N, K], N output channels.
        chunks: a few rows in float32 at a time, with where they lie.
        observe: called with some rows' float32 values, codes and scales, while they are in the cache.

    Returns:
        (float8_e4m3fn [N, K], float32 scale [N, 1]).
    """
    codes = new_matrix(shape, torch.float8_e4m3fn)
    scale = torch.empty(shape[0], 1, dtype=torch.float32)
    for where, plain in chunks:
        work = work_rows(2, len(plain), plain, torch.float32)
        own = torch.abs(plain, out=work).amax(dim=1, keepdim=True).div_(NEURON_E4M3_MAX)
        own.masked_fill_(own == 0, 1.0)
        scale[where] = own
        # No quotient is above 240 by more than a rounding of float32, which the conversion rounds away.
        codes[where] = torch.div(plain, own, out=work)
        if observe is not None:
            observe(plain, codes[where], scale[where])
    return codes, scale
