"""The MLA decode kernel at K2's sizes against float64, LNC=1 and 2, lengths from 0 to the whole cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k2.nki.kernels.mla_decode import mla_decode_pages

from .relative_error import relative

RANK, ROPE, SCALE, PAGE = 512, 64, 0.1447, 32


def draw(batch: int, slots: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, halves of pages in any order with others between, rows, the new entry's parts, lengths."""
    generator = torch.Generator().manual_seed(batch + slots + heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pages = normal(batch * slots // PAGE + 8, PAGE, RANK + ROPE)
    table = torch.randperm(len(pages), generator=generator)[: batch * slots // PAGE].view(batch, -1)
    rows = (table.unsqueeze(-1) * PAGE + torch.arange(PAGE)).flatten(1).to(torch.int32)
    halves = (half.reshape(-1, (RANK + ROPE) // 2) for half in pages.chunk(2, dim=-1))
    lengths = torch.randint(0, slots + 1, (batch, 1), generator=generator, dtype=torch.int32)
    lengths[0], lengths[-1] = 0 if batch > 1 else slots, slots
    return normal(batch, heads, RANK + ROPE), *halves, rows, normal(batch, RANK), normal(batch, ROPE), lengths


def reference(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """In `dtype`: softmax(scale * q . entries) . latents, over the slots in use and the new entry."""
    query, former, latter, new_latents, new_keys = (one.to(dtype) for one in (*inputs[:3], *inputs[4:6]))
    new = torch.cat((new_latents, new_keys), -1).unsqueeze(1)
    entries = torch.cat((torch.cat((former, latter), -1)[inputs[3].long()], new), 1)
    scores, slots = torch.einsum("bhd,bsd->bhs", query, entries) * SCALE, inputs[3].shape[1]
    hidden = torch.arange(slots + 1)[None] >= inputs[6]
    hidden[:, slots] = False
    return scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1) @ entries[..., :RANK]


@pytest.mark.parametrize(
    ("batch", "slots", "heads", "cores"), [(1, 4096, 1, 2), (1, 4096, 2, 1), (4, 1024, 1, 2), (2, 1536, 100, 2)]
)
def test_attention_in_float32(batch: int, slots: int, heads: int, cores: int) -> None:
    inputs = draw(batch, slots, heads, torch.float32)
    assert relative(mla_decode_pages[cores](*inputs, SCALE), reference(inputs, torch.float64)) < 1e-5


@pytest.mark.parametrize(("batch", "cores"), [(1, 2), (4, 1), (16, 2), (64, 2)])
def test_attention_in_bfloat16_is_no_farther_than_pytorch(batch: int, cores: int) -> None:
    inputs = draw(batch, 4096 if batch == 1 else 256, 1, torch.bfloat16)
    wanted = reference(inputs, torch.float64)
    error = relative(mla_decode_pages[cores](*inputs, SCALE), wanted)
    assert error <= relative(reference(inputs, torch.bfloat16), wanted)
    assert error < 5e-3
