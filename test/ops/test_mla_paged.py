"""Attention over pages against the same over a cache in one piece, and storing into pages."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.ops.mla_decode import mla_decode
from kimi_k2.ops.mla_paged import gather_pages, paged_mla_decode, store_pages

RANK, ROPE, PAGE = 24, 8, 4
DIM = RANK + ROPE


def scattered(
    lengths: list[int], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache in one piece, and the same in pages of any order among others; page 0 belongs to nobody."""
    torch.manual_seed(len(lengths))
    width = max(-(-length // PAGE) for length in lengths)
    whole = torch.randn(len(lengths), width * PAGE, DIM, dtype=dtype)
    order = torch.randperm(2 * len(lengths) * width)[: len(lengths) * width] + 1
    pages = torch.randn(2 * len(lengths) * width + 1, PAGE, DIM, dtype=dtype)
    table = order.view(len(lengths), width).int()
    pages[order] = whole.view(-1, PAGE, DIM)
    return whole, pages, table


@pytest.mark.parametrize("lengths", [[1], [4, 5, 13], [16, 1, 7, 9]])
def test_same_as_in_one_piece(lengths: list[int]) -> None:
    whole, pages, table = scattered(lengths)
    query, seq_lens = torch.randn(len(lengths), 3, DIM, dtype=torch.float64), torch.tensor(lengths, dtype=torch.int32)
    found = paged_mla_decode(query, pages, table, seq_lens, 0.3, RANK)
    torch.testing.assert_close(found, mla_decode(query, whole, seq_lens, 0.3, RANK), rtol=1e-12, atol=1e-12)


def test_padding_is_finite() -> None:
    _, pages, table = scattered([5, 5])
    seq_lens = torch.tensor([5, 0], dtype=torch.int32)
    assert paged_mla_decode(torch.randn(2, 3, DIM).double(), pages, table, seq_lens, 0.3, RANK).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_stored_where_it_belongs(dtype: torch.dtype) -> None:
    cache = torch.randn(5, PAGE, DIM).to(dtype)
    before, entries = cache.float().clone(), torch.randn(4, DIM)
    store_pages(cache, entries, torch.tensor([17, -1, 6, -1]))
    wanted = before.view(-1, DIM)
    wanted[17], wanted[6] = entries[0].to(dtype).float(), entries[2].to(dtype).float()
    assert torch.equal(cache.float().view(-1, DIM), wanted)


def test_gathered_in_order() -> None:
    whole, pages, table = scattered([9, 16])
    assert torch.equal(gather_pages(pages, table, 9), whole[:, :9])
