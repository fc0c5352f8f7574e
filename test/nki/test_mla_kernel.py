"""The MLA decode kernel at K2's sizes against float64, LNC=1 and 2, lengths from 0 to the whole cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k2.nki.kernels.mla_decode import mla_decode, mla_decode_pages

from .relative_error import relative

RANK, ROPE, SCALE = 512, 64, 0.1447


def draw(batch: int, slots: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch + slots + heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query, latents, keys = normal(batch, heads, RANK + ROPE), normal(batch, slots, RANK), normal(batch, slots, ROPE)
    lengths = torch.randint(0, slots + 1, (batch, 1), generator=generator, dtype=torch.int32)
    lengths[0], lengths[-1] = 0 if batch > 1 else slots, slots
    return query, latents, keys, normal(batch, RANK), normal(batch, ROPE), lengths


def reference(
    lengths: Tensor, query: Tensor, latents: Tensor, keys: Tensor, new_latents: Tensor, new_keys: Tensor
) -> Tensor:
    """In the inputs' dtype: softmax(scale * q . entries) . latents, over the slots in use and the new entry."""
    values = torch.cat((latents, new_latents[:, None]), 1)
    entries = torch.cat((values, torch.cat((keys, new_keys[:, None]), 1)), 2)
    scores = torch.einsum("bhd,bsd->bhs", query, entries) * SCALE
    slots = latents.shape[1]
    hidden = torch.arange(slots + 1)[None] >= lengths
    hidden[:, slots] = False
    return scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1) @ values


@pytest.mark.parametrize(
    ("batch", "slots", "heads", "cores"), [(1, 4096, 1, 2), (1, 4096, 2, 1), (4, 1024, 1, 2), (3, 512, 64, 2)]
)
def test_attention_in_float32(batch: int, slots: int, heads: int, cores: int) -> None:
    inputs = draw(batch, slots, heads, torch.float32)
    wanted = reference(inputs[5], *(t.double() for t in inputs[:5]))
    assert relative(mla_decode[cores](*inputs, SCALE), wanted) < 1e-5


@pytest.mark.parametrize(("batch", "cores", "dtype"), [(3, 2, torch.float32), (1, 1, torch.bfloat16)])
def test_pages_are_read_where_they_lie(batch: int, cores: int, dtype: torch.dtype) -> None:
    """Bit for bit what the kernel gives for the same entries in one piece: pages of 32 in any order, others between."""
    query, latents, keys, *others = draw(batch, 512, 2, dtype)
    generator = torch.Generator().manual_seed(batch)
    pages = torch.randn(batch * 16 + 8, 32, RANK + ROPE, generator=generator).to(dtype)
    table = torch.randperm(len(pages), generator=generator)[: batch * 16].view(batch, 16)
    pages[table] = torch.cat((latents, keys), dim=-1).view(batch, 16, 32, -1)
    former, latter = (half.reshape(-1, (RANK + ROPE) // 2) for half in pages.chunk(2, dim=-1))
    rows = (table.unsqueeze(-1) * 32 + torch.arange(32)).flatten(1).to(torch.int32)
    got = mla_decode_pages[cores](query, former, latter, rows, *others, SCALE)
    assert (got == mla_decode[cores](query, latents, keys, *others, SCALE)).all()


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_attention_in_bfloat16_is_no_farther_than_pytorch(batch: int) -> None:
    inputs = draw(batch, 4096 if batch == 1 else 256, 1, torch.bfloat16)
    wanted = reference(inputs[5], *(t.double() for t in inputs[:5]))
    error = relative(mla_decode[2](*inputs, SCALE), wanted)
    assert error <= relative(reference(inputs[5], *inputs[:5]), wanted)
    assert error < 5e-3


@pytest.mark.parametrize(("heads", "cores"), [(8, 2), (2, 1)])
def test_parts_of_four_ranks_merge_to_the_whole(heads: int, cores: int) -> None:
    """Flash decoding: each rank has a quarter of the slots, one of them the new entry, and one rank none in use."""
    ranks = 4
    inputs = draw(2, 256 * ranks, heads, torch.float32)
    lengths = torch.tensor([[256 * 3], [700]], dtype=torch.int32)  # the last rank holds nothing of either
    wanted = reference(lengths, *(t.double() for t in inputs[:5]))
    sums, logs = [], []
    for rank in range(ranks):
        slots = slice(256 * rank, 256 * (rank + 1))
        mine = (lengths - 256 * rank).clamp(0, 256)
        own = torch.tensor([[int(rank == 1)], [int(rank == 2)]], dtype=torch.int32)
        cache = inputs[1][:, slots].contiguous(), inputs[2][:, slots].contiguous()
        part = mla_decode[cores](inputs[0], *cache, *inputs[3:5], mine, SCALE, own, return_logsumexp=True)
        sums.append(torch.from_numpy(part[0]).double())
        logs.append(torch.from_numpy(part[1]).double())
    shares = torch.stack(logs).softmax(0)
    merged = (torch.stack(sums) * shares[..., None]).sum(0)
    assert shares[3].max() == 0
    assert relative(merged, wanted) < 1e-5


@pytest.mark.parametrize("cores", [1, 2])
def test_the_first_slots_of_a_longer_cache(cores: int) -> None:
    """What lies behind them is not read: it is no number here."""
    inputs = draw(3, 256, 2, torch.float32)
    longer = [torch.cat((part, torch.full_like(part, torch.nan)), dim=1) for part in inputs[1:3]]
    wanted = mla_decode[cores](*inputs, SCALE)
    got = mla_decode[cores](inputs[0], *longer, *inputs[3:], SCALE, slots=256)
    assert (got == wanted).all()
