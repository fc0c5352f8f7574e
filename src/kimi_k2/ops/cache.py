"""The compressed KV cache of MLA, one latent and one rotary key a token a layer: writing it, and reading pages.

Sizes: N pages of P slots, C = rank + rope values a slot, B sequences, T new tokens. Slots are numbered through all
pages. A cache in one piece for each sequence is one of N = B pages, of which sequence b has page b: its block table is
int32 [B, 1], 0 .. B - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.registry import ELEMENTWISE, operation


def to_cache(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries as a cache of `dtype` holds them; e4m3 is saturated at 448, as vLLM's FP8 cache of scale 1 is."""
    if dtype == torch.float8_e4m3fn:
        entries = entries.clamp(-448.0, 448.0)
    return entries.to(dtype)


@operation(batch_invariant=ELEMENTWISE)
def store_entries(cache: Tensor, entries: Tensor, positions: Tensor) -> None:
    """Put entries [B, S, C] into the slots `positions` int64 [B, S] of cache [B, T, C]; negative ones into none.

    Nothing is read back from a GPU, so that a CUDA graph can hold the call. Positions from T on are the caller's error:
    PyTorch raises or, on a GPU, may write elsewhere or drop them.
    """
    (batch, capacity, width), size = cache.shape, entries.shape[0] * entries.shape[1]
    entries = to_cache(entries, cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:  # PyTorch indexes no FP8
        cache, entries = cache.view(torch.uint8), entries.view(torch.uint8)
    if positions.device.type == "cpu" or not size:
        rows, columns = torch.where(positions >= 0)
        cache[rows, positions[rows, columns]] = entries[rows, columns]
        return
    first = torch.arange(0, batch * capacity, capacity, device=positions.device).unsqueeze(1)
    slots = torch.where(positions >= 0, positions + first, -1).flatten()
    _store_unread(cache, entries.reshape(size, width), slots)


def _store_unread(cache: Tensor, entries: Tensor, slots: Tensor) -> None:
    """Entries [T, C] into slots int64 [T] of cache [N, P, C], of which none is read back.

    Padding repeats what the first token stores; without any token slot 0 is written with what it holds.
    """
    there, order = slots >= 0, torch.arange(len(slots), device=slots.device)
    source = torch.where(there, order, there.int().argmax())
    at = slots[source].clamp(min=0)
    pages, within = at.div(cache.shape[1], rounding_mode="floor"), at % cache.shape[1]
    cache[pages, within] = torch.where(there.any(), entries[source], cache[pages, within])


def store_slots(cache: Tensor, entries: Tensor, slots: Tensor) -> None:
    """`store_entries` of entries [T, C] into slots int64 [T], numbered through all of cache [N, P, C]."""
    store_entries(cache.view(1, -1, cache.shape[-1]), entries.unsqueeze(0), slots.unsqueeze(0))


def slots_of(positions: Tensor, block_table: Tensor, page: int) -> Tensor:
    """int64 [B] or [B, S], none negative, to slots numbered through all pages of `page` slots."""
    if block_table.shape[1] == 1:
        return torch.add(positions, block_table.view(-1, *[1] * (positions.dim() - 1)), alpha=page)
    pages = block_table.gather(1, (positions // page).view(len(positions), -1)).view_as(positions)
    return pages.long() * page + positions % page


@operation(batch_invariant=ELEMENTWISE)
def decode_places(positions: Tensor, block_table: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Where one new token a sequence goes.

    Args:
        positions: int64 [B], none negative.
        block_table: int32 [B, pages].
        page: slots a page.

    Returns:
        int32 [B], slots in use once the tokens are stored, and int64 [B], the slots to store them in.
    """
    return (positions + 1).to(torch.int32), slots_of(positions, block_table, page)


@operation(batch_invariant=ELEMENTWISE)
def chunk_slots(positions: Tensor, block_table: Tensor, page: int) -> Tensor:
    """Slots int64 [B, S] of tokens at positions int64 [B, S]; negative ones are padding, whose slot is -1."""
    return torch.where(positions >= 0, slots_of(positions.clamp(min=0), block_table, page), -1)


def gather_pages(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` slots of each sequence, a copy.

    Args:
        cache: [N, P, C].
        block_table: int32 [B, pages], of each P slots of a sequence; entries past its end may be anything within N.
        length: at least 1.

    Returns:
        [B, length, C].
    """
    count = -(-length // cache.shape[1])
    return cache[block_table[:, :count].long()].flatten(1, 2)[:, :length]


@operation(batch_invariant=ELEMENTWISE)
def next_step(
    seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> None:
    """Each sequence gets one new token: written are its length, its position and its slot. Nothing is read back.

    Rows of length 0 are padding: they keep it, and get token and position 0 and a negative slot, so that what they
    compute follows from no earlier step.

    Args:
        seq_lens: int32 [B], tokens in the cache; one more afterwards.
        input_ids: int32 [B], the new tokens.
        positions: int64 [B], written.
        slots: int64 [B], written: where the new token is to be stored, numbered through all pages.
        block_table: int32 [B, pages], pages of each sequence.
        page: slots a page.
    """
    there = seq_lens > 0
    positions.copy_(seq_lens)
    pages = block_table.gather(1, (positions // page).unsqueeze(1)).squeeze(1).long()
    slots.copy_(torch.where(there, pages * page + positions % page, -1))
    seq_lens.add_(there)
    input_ids.mul_(there)
