"""Decode context parallelism: a sequence's tokens are dealt to the ranks in runs.

In a decode step each rank attends with the heads of all ranks over the tokens that it holds, and the partial results
are combined by their log-sum-exp. In prefill a rank attends with its own heads over entries gathered from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.ops.mla import Ragged, to_cache


class Gathered(NamedTuple):
    """Where the slots of a chunk's sequences come from, one sequence after the other.

    Attributes:
        places: page and offset of what this rank sends, [M] each, as many as every other rank.
        order: int64 [S], of each slot its row among what all ranks give and, behind that, the chunk's new entries.
    """

    places: tuple[Tensor, Tensor]
    order: Tensor


@dataclass(frozen=True)
class Spread:
    """The ranks that hold each sequence together, tokens p with p // run % ranks == rank.

    Attributes:
        ranks: how many.
        rank: this one.
        run: consecutive tokens on one rank.
        gather: of rows [n, ...] all ranks' [ranks * n, ...], one rank's behind the other's.
        reduce: the sum over the ranks.
    """

    ranks: int
    rank: int
    run: int
    gather: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]

    def held(self, lengths: Tensor, rank: int | None = None) -> Tensor:
        """How many of sequences' first `lengths` tokens, int32 or int64 [B], a rank holds; by default this one."""
        turn, first = self.run * self.ranks, self.run * (self.rank if rank is None else rank)
        return lengths // turn * self.run + (lengths % turn - first).clamp(0, self.run)

    def queries(self, query: Tensor) -> Tensor:
        """A rank's heads [B, H, C] to all ranks' [B, ranks * H, C]."""
        by_rank = self.gather(query).view(self.ranks, *query.shape)
        return by_rank.transpose(0, 1).flatten(1, 2)

    def join(self, summed: Tensor, lse: Tensor) -> Tensor:
        """Of all heads over what this rank holds [B, ranks * H, rank], this rank's heads over everything.

        Args:
            summed: of `mla_decode`.
            lse: its logarithms of sums of exponentials, [B, ranks * H]; without a slot on any rank the result is zero.

        Returns:
            [B, H, rank].
        """
        shares = self.gather(lse).view(self.ranks, *lse.shape).softmax(0).nan_to_num(0)
        joined = self.reduce(summed * shares[self.rank].unsqueeze(-1))
        return joined.chunk(self.ranks, dim=1)[self.rank].to(summed.dtype)

    def gathered(self, new: Ragged, keys: Ragged, table: Tensor, page: int) -> Gathered:
        """Of sequences whose lengths the host knows; nothing is read back, and nothing copied from the host.

        Args:
            new: new tokens of each sequence.
            keys: its slots, with the new tokens'.
            table: int32 [B, pages], pages of what this rank holds.
            page: slots of a page.
        """
        device, turn, count = table.device, self.run * self.ranks, sum(keys.lengths)
        old = torch.tensor(keys.lengths, device="cpu") - torch.tensor(new.lengths, device="cpu")
        rank_slots = int(self.held(old, 0).sum())  # the first rank has as many as any
        before = keys.starts.diff() - new.starts.diff()
        rank_lengths = self.held(before, 0)
        firsts = torch.cat((rank_lengths.new_zeros(1), rank_lengths.cumsum(0)))
        numbers = torch.arange(len(table), device=device)
        sequence = numbers.repeat_interleave(keys.starts.diff(), output_size=count)
        at = torch.arange(count, device=device) - keys.starts[sequence]
        theirs = at // self.run % self.ranks * rank_slots + firsts[sequence] + at // turn * self.run + at % self.run
        fresh = self.ranks * rank_slots + new.starts[sequence] + at - before[sequence]
        order = torch.where(at < before[sequence], theirs, fresh)
        sequence = numbers.repeat_interleave(rank_lengths, output_size=rank_slots)
        position = torch.arange(rank_slots, device=device) - firsts[sequence]
        return Gathered((table[sequence, position // page].long(), position % page), order)

    def slots(self, cache: Tensor, entries: Tensor, gathered: Gathered) -> Tensor:
        """What the cache holds of a chunk's sequences, [S, C], of which `entries` [T, C] are new."""
        own, entries = cache[gathered.places], to_cache(entries, cache.dtype)
        if cache.dtype == torch.float8_e4m3fn:  # which neither PyTorch joins nor every library sends
            own, entries = own.view(torch.uint8), entries.view(torch.uint8)
        return torch.cat((self.gather(own), entries))[gathered.order].view(cache.dtype)
