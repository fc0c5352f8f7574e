"""Transposition of experts: every width, format and number of parts, held to torch's own transposition."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.sharding.experts import input_first

DTYPES = (torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [8, 96, 1024])
@pytest.mark.parametrize("columns", [1, 48, 300, 1536])
@pytest.mark.parametrize("count", [1, 2])
def test_input_first(dtype: torch.dtype, rows: int, columns: int, count: int) -> None:
    draw = torch.Generator().manual_seed(rows + columns)
    size = dtype.itemsize
    drawn = torch.randint(0, 256, (count, rows, columns * size), dtype=torch.uint8, generator=draw)
    matrices = list(drawn.view(dtype))
    for parts in (1, 2, 8):
        made = input_first(*matrices, parts=parts)
        assert made.dtype == dtype
        cut = [matrix.unflatten(0, (parts, rows // parts)) for matrix in drawn.unflatten(2, (columns, size))]
        expected = torch.cat(cut, dim=1).transpose(1, 2)
        assert torch.equal(made.contiguous().view(torch.uint8).unflatten(-1, (-1, size)), expected)
