"""The sequences of a step over an engine's cache in pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.ops.mla_ragged import Ragged

# Slots whose keys and values are expanded at once: 320 values of a head each, 340 MB for 8 heads in BF16.
MOST_SLOTS = 65536


@dataclass
class Batch:
    """The sequences of a step; those with one new token come first.

    Attributes:
        query_start: where each sequence's new tokens begin, on the host, and where the last ends.
        query_starts: int32 [B + 1], the same on the device.
        seq_lens: int32 [B], tokens in the cache once the new ones are stored.
        lengths: the same on the host, of the sequences with more than one new token.
        block_table: int32 [B, P], pages of each sequence.
        slots: int64 [T], where each new token is stored; negative for padding.
        decodes: sequences with one new token.
    """

    query_start: list[int]
    query_starts: Tensor
    seq_lens: Tensor
    lengths: list[int]
    block_table: Tensor
    slots: Tensor
    decodes: int
    _prompts: Prompts | None = field(default=None, init=False, repr=False)

    def prompts(self, page: int) -> Prompts:
        """Of the sequences with more than one new token, over pages of `page` slots; the same for all layers."""
        if self._prompts is None:
            last, first = self.decodes + len(self.lengths), self.query_start[self.decodes]
            starts = [start - first for start in self.query_start[self.decodes : last + 1]]
            rows = [slice(start, end) for start, end in pairwise(starts)]
            positions = [
                torch.arange(length - (at.stop - at.start), length, device=self.slots.device).unsqueeze(0)
                for at, length in zip(rows, self.lengths, strict=True)
            ]
            together = self._together(rows, page) if len(rows) > 1 and sum(self.lengths) <= MOST_SLOTS else None
            self._prompts = Prompts(rows, positions, self.slots[first : self.query_start[-1]], together)
        return self._prompts

    def _together(self, rows: list[slice], page: int) -> Together:
        """Nothing is read back, and nothing copied from the host."""
        new, last = tuple(at.stop - at.start for at in rows), self.decodes + len(self.lengths)
        zero = self.seq_lens.new_zeros(1)
        query_starts = self.query_starts[self.decodes : last + 1]
        queries = Ragged(new, query_starts - query_starts[0])
        if new == tuple(self.lengths):
            return Together(queries, queries, None)
        lengths = self.seq_lens[self.decodes : last]
        keys = Ragged(tuple(self.lengths), torch.cat((zero, lengths.cumsum(0, dtype=torch.int32))))
        count = sum(self.lengths)
        sequence = torch.arange(len(rows), device=lengths.device).repeat_interleave(lengths, output_size=count)
        place = torch.arange(count, device=lengths.device) - keys.starts[sequence]
        pages = self.block_table[self.decodes : last][sequence, place.div(page, rounding_mode="floor")]
        return Together(queries, keys, (pages.long(), place % page))


class Together(NamedTuple):
    """Several sequences whose attention is computed at once.

    Attributes:
        queries: their new tokens.
        keys: their slots.
        places: page and place in it of each slot; None where the new tokens are all there is.
    """

    queries: Ragged
    keys: Ragged
    places: tuple[Tensor, Tensor] | None


class Prompts(NamedTuple):
    """What all layers' caches have in common for the sequences with more than one new token.

    Attributes:
        rows: of each sequence, among the new tokens of these sequences.
        positions: int64 [1, S] of each sequence's new tokens.
        slots: int64 [T], of all new tokens.
        together: of several sequences; None of one, or where their slots are too many.
    """

    rows: list[slice]
    positions: list[Tensor]
    slots: Tensor
    together: Together | None
