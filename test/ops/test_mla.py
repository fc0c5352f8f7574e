"""MLA's plain functions: pages against a cache in one piece, several sequences against sums in float64, next slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_k2.ops import mla
from kimi_k2.ops.mla import (
    SLOTS_AT_ONCE,
    Ragged,
    mla_decode,
    mla_ragged_attention,
    next_step,
    store_slots,
)

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


def test_padding_is_finite() -> None:
    _, pages, table = scattered([5, 5])
    seq_lens = torch.tensor([5, 0], dtype=torch.int32)
    assert mla_decode(torch.randn(2, 3, DIM).double(), pages, seq_lens, 0.3, RANK, None, table).isfinite().all()


@pytest.mark.parametrize("lengths", [[1, 600], [0, 13, 4]])
def test_parts_of_a_context_are_joined_by_their_sums(lengths: list[int]) -> None:
    """Every other slot in a cache of its own: logarithms of sums as torch has them, and the whole context's result."""
    whole, pages, table = scattered(lengths)
    query = torch.randn(len(lengths), 3, DIM, dtype=torch.float64)
    found, logs = [], []
    for part in range(3):  # the last one is the whole
        some = whole[:, part::2] if part < 2 else whole
        seen = torch.tensor([len(range(length)[part::2]) if part < 2 else length for length in lengths]).int()
        lse = query.new_empty(query.shape[:2])
        cache, pages_of = (some, None) if part < 2 else (pages, table)
        found.append(mla_decode(query, cache, seen, 0.3, RANK, None, pages_of, lse))
        hidden = (torch.arange(some.shape[1]) >= seen[:, None])[:, None]
        scores = (query @ some.mT * 0.3).masked_fill(hidden, float("-inf"))
        torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
        logs.append(lse)
    shares = torch.stack(logs[:2]).softmax(0).unsqueeze(-1)
    joined, there = shares[0] * found[0] + shares[1] * found[1], torch.tensor(lengths) > 0
    torch.testing.assert_close(joined[there], found[2][there], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("store", [store_slots, mla._store_unread])
def test_padding_leaves_the_first_slot_to_its_token(store: Callable[..., None]) -> None:
    """Padding before and behind the token of slot 0, and padding alone; the way of a CPU and that of a GPU."""
    cache, entries = torch.ones(2, PAGE, DIM), torch.tensor([[3.0], [2.0], [4.0]]).expand(3, DIM)
    store(cache, entries, torch.tensor([-1, -1, -1]))
    assert bool((cache == 1).all())
    store(cache, entries, torch.tensor([-1, 0, 6]))
    rows = cache.view(-1, DIM)
    assert bool((rows[0] == 2).all() and (rows[6] == 4).all())
    assert int((rows != 1).any(-1).sum()) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_plain_pages_can_be_captured_and_copy_little(dtype: torch.dtype) -> None:
    """Nothing is read back, in tensors without values, and no intermediate is as large as the context."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
                largest = max(largest, out.numel())
            return out

    batch, pages, page = 2, 64, 64
    with torch.device("meta"), Sizes():  # type: ignore[no-untyped-call]
        cache, table = torch.empty(batch * pages, page, DIM, dtype=dtype), torch.zeros(batch, pages, dtype=torch.int32)
        largest, slots, seq_lens = 0, torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int32)
        store_slots(cache, torch.empty(batch, DIM, dtype=dtype), slots)
        query = torch.empty(batch, 3, DIM, dtype=dtype)
        assert mla_decode(query, cache, seq_lens, 0.3, RANK, None, table).shape == (batch, 3, RANK)
    assert largest <= batch * SLOTS_AT_ONCE * DIM < batch * pages * page * DIM


@pytest.mark.parametrize(("new", "lengths"), [((3, 1, 7), (3, 1, 7)), ((2, 4, 1), (9, 4, 6)), ((2, 0, 3), (2, 5, 8))])
def test_each_sequence_sees_its_own_slots(new: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    torch.manual_seed(len(new))
    heads, nope_dim, value_dim, scale = 2, 6, 5, 0.3
    nope, rope = (torch.randn(sum(new), heads, width).double() for width in (nope_dim, ROPE))
    slots, kv_b = torch.randn(sum(lengths), DIM).double(), torch.randn(heads, nope_dim + value_dim, RANK).double()
    queries, keys = (Ragged(of, torch.tensor([0, *itertools.accumulate(of)]).int()) for of in (new, lengths))
    found, wanted = mla_ragged_attention(nope, rope, slots, kv_b, queries, keys, scale), []
    expanded = torch.einsum("tr,hvr->htv", slots[:, :RANK], kv_b)
    scores = torch.einsum("qhd,htd->qht", nope, expanded[..., :nope_dim]) + rope @ slots[:, RANK:].T
    for row, (sequence, number) in enumerate((s, n) for s, count in enumerate(new) for n in range(count)):
        first = sum(lengths[:sequence])
        seen = slice(first, first + lengths[sequence] - new[sequence] + number + 1)
        weights = (scale * scores[row, :, seen]).softmax(-1)
        wanted.append(torch.einsum("ht,htv->hv", weights, expanded[:, seen, nope_dim:]))
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [[1], [63, 64, 65, 0, 127, 128, 0], [5000]])
def test_each_sequence_has_its_next_slot(lengths: list[int]) -> None:
    """Pages have been drawn; all that is to be written holds something else."""
    torch.manual_seed(len(lengths))
    batch, wide = len(lengths), max(lengths) // 64 + 1
    seq_lens, positions, slots = torch.tensor(lengths).int(), torch.full((batch,), 77), torch.full((batch,), 77)
    input_ids = torch.randint(1, 1000, (batch,)).int()
    table = (torch.randperm(2 * batch * wide)[: batch * wide] + 1).view(batch, wide).int()
    ids, pages = input_ids.tolist(), table.tolist()
    next_step(seq_lens, input_ids, positions, slots, table, 64)
    assert seq_lens.tolist() == [length + 1 if length else 0 for length in lengths]
    assert positions.tolist() == lengths
    assert input_ids.tolist() == [one if length else 0 for one, length in zip(ids, lengths, strict=True)]
    held = [row[length // 64] * 64 + length % 64 for row, length in zip(pages, lengths, strict=True)]
    assert slots.tolist() == [slot if length else -1 for slot, length in zip(held, lengths, strict=True)]
