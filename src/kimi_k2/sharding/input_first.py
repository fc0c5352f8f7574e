"""Transposition of an expert's matrices to [input, output], as fast as the memory: most of a conversion's work."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.quantization.rows import new_matrix

_ROWS = 32
_TILE = 2**19  # bytes that are transposed at a time: twice as many fit a core's cache


def input_first(*matrices: Tensor, parts: int = 1) -> Tensor:
    """[N, K] matrices of one shape to [parts, K, columns]: of each matrix a part's columns, side by side."""
    dtype = matrices[0].dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    rows, columns = matrices[0].shape
    width = rows // parts
    out = new_matrix((parts, columns, width * len(matrices)), dtype)
    if dtype.itemsize == 1:
        _bytes_input_first([matrix.view(torch.uint8) for matrix in matrices], out.view(torch.uint8))
        return out
    target = out.view(bits).numpy()
    for place, matrix in enumerate(matrices):
        source = matrix.contiguous().view(bits).numpy().reshape(parts, width, columns)
        # A few rows at a time, so that each cache line is read and written once; torch walks the whole matrix.
        for first in range(0, width, _ROWS):
            some = source[:, first : first + _ROWS]
            column = place * width + first
            target[:, :, column : column + some.shape[1]] = some.transpose(0, 2, 1)
    return out


def _bytes_input_first(matrices: list[Tensor], out: Tensor) -> None:
    """`input_first` of uint8, into `out`."""
    parts, columns, together = out.shape
    rows = together // len(matrices)
    for part in range(parts):
        held = [matrix[part * rows : (part + 1) * rows] for matrix in matrices]
        if together * columns <= _TILE:
            out[part] = _transposed(torch.cat(held))
            continue
        step = max(1, _TILE // columns)
        for place, matrix in enumerate(held):
            for first in range(0, rows, step):
                tile = _transposed(matrix[first : first + step].contiguous())
                column = place * rows + first
                out[part, :, column : column + tile.shape[1]] = tile


def _transposed(tile: Tensor) -> Tensor:
    """A contiguous uint8 [N, K] as [K, N].

    Of all that torch and NumPy offer, the shuffle of channels alone transposes bytes with vector instructions: N groups
    of K channels, the channels last, become K groups of N.
    """
    rows, columns = tile.shape
    size = rows * columns
    pixel = tile.view(-1).as_strided((1, size, 1, 1), (size, 1, size, size))
    return torch.native_channel_shuffle(pixel, rows).view(columns, rows)
