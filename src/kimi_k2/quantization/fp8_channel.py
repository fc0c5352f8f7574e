"""FP8 with one float32 scale an output channel, for Trainium2's e4m3: the largest code is 240."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kimi_k2.quantization.neuron_e4m3 import NEURON_E4M3_MAX
from kimi_k2.quantization.rows import new_matrix, work_rows

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
