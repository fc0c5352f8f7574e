"""FP8 with one float32 scale an output channel, for Trainium2's e4m3: the largest code is 240."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kimi_k2.quantization.fp8_block import dequantized_chunks, e4m3_to_float32
from kimi_k2.quantization.neuron_e4m3 import NEURON_E4M3_MAX
from kimi_k2.quantization.rows import new_matrix, row_chunks, work_rows

Observer = Callable[[Tensor, Tensor, Tensor], None]


def quantize_fp8_channel(weight: Tensor, observe: Observer | None = None) -> tuple[Tensor, Tensor]:
    """Quantize with scale = amax / 240 a row, round to nearest even; a row of zeros gets scale 1.

    Args:
        weight: floating [..., N, K], N output channels.
        observe: called with some rows' float32 values, codes and scales, while they are in the cache.

    Returns:
        (float8_e4m3fn [..., N, K], float32 scale [..., N, 1]).
    """
    rows = weight.reshape(-1, weight.shape[-1])
    codes, scale = quantize_chunks(rows.shape, row_chunks(rows), observe)
    return codes.view(weight.shape), scale.view(*weight.shape[:-1], 1)


def requantize_fp8_channel(
    weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int], observe: Observer | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_fp8_channel` of a dequantized block-FP8 weight [N, K], without ever holding it whole.

    Args:
        weight: float8_e4m3fn [N, K].
        weight_scale_inv: float32, one scale a block of `block_size`.
        block_size: (rows, columns) of a block.
        observe: as in `quantize_fp8_channel`.
    """
    chunks = dequantized_chunks(weight, weight_scale_inv.to(torch.float32), block_size)
    return quantize_chunks(weight.shape, chunks, observe)


def quantize_chunks(
    shape: torch.Size, chunks: Iterable[tuple[slice, Tensor]], observe: Observer | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_fp8_channel` of a [N, K] weight whose float32 rows come a few at a time, with where they lie."""
    codes = new_matrix(shape, torch.float8_e4m3fn)
    scale = torch.empty(shape[0], 1, dtype=torch.float32)
    for part, plain in chunks:
        work = work_rows(2, len(plain), plain, torch.float32)
        own = torch.abs(plain, out=work).amax(dim=1, keepdim=True).div_(NEURON_E4M3_MAX)
        own.masked_fill_(own == 0, 1.0)
        scale[part] = own
        # No quotient is above 240 by more than a rounding of float32, which the conversion rounds away.
        codes[part] = torch.div(plain, own, out=work)
        if observe is not None:
            observe(plain, codes[part], scale[part])
    return codes, scale


def dequantize_fp8_channel(weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., N, K] from codes [..., N, K] and scales [..., N, 1]."""
    return e4m3_to_float32(weight).mul_(scale)
