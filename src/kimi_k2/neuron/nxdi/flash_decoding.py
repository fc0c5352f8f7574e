"""Flash decoding: the ranks of a group hold a part of the latent cache each, and share all their heads' queries.

Positions lie round the group as NxDI lays them (`modules/flashdecode/utils.py`): position p on the rank whose number in
its group is p % g, in slot p // g. NxDI makes the masks of a step by that rule and reserves slots behind the last one,
where a rank writes what belongs to another.

With prefix caching the same rule holds within each block, whose size the group divides: a slot of the block cache is on
the rank that its position is on. A prompt's part behind a cached prefix is then computed like a step: all heads of the
group attend to the rank's own positions, of the prefix and of the part.
"""

from __future__ import annotations

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_tensor_model_parallel_region_with_dim,
    reduce_scatter_to_tensor_model_parallel_region_with_dim,
)
from torch import Tensor


def group_heads(heads: Tensor) -> Tensor:
    """[B, h, S, x] of each rank to [B, g h, S, x] of its group, in the order of the ranks."""
    return _gathered(heads, 1)


def combine(sums: Tensor, logsumexp: Tensor) -> Tensor:
    """Attention over all positions of the group from each rank's own.

    Args:
        sums: float32 [B, g h, S, x], softmax over this rank's positions times their values.
        logsumexp: float32 [B, g h, S, 1] of the same positions' scores.

    Returns:
        float32 [B, h, S, x] of this rank's heads.
    """
    # A rank without a position yet has scores of finfo.min, and no weight.
    total = _gathered(logsumexp, 3).logsumexp(dim=3, keepdim=True)
    weighted = sums * (logsumexp - total).exp()
    group = parallel_state.get_kv_shared_group()
    heads: Tensor = reduce_scatter_to_tensor_model_parallel_region_with_dim(weighted, 1, group)
    return heads


def _gathered(tensor: Tensor, dimension: int) -> Tensor:
    group = parallel_state.get_kv_shared_group()
    whole: Tensor = gather_from_tensor_model_parallel_region_with_dim(tensor, dimension, group)
    return whole


def own_positions(entries: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """Of a prompt's entries [B, 1, S, x] those that this rank holds, [B, 1, S / ranks, x].

    Args:
        rank: this rank's number, int [1].
        ranks: size of the group; divides S.
    """
    return entries.index_select(2, every_nth(entries.shape[2], rank, ranks))


def slots_to_write(position_ids: Tensor, owned: Tensor, seq_ids: Tensor, ranks: int, slots: int) -> Tensor:
    """The slot that each token of a step is written to.

    NxDI's rule takes the last slot of the bucket for what is not written, and does not look at `seq_ids`: in a step of
    some of the cache lines, others may hold live tokens at both places. Here it is the last slot of the cache.

    Args:
        position_ids: int [B, S].
        owned: [B, S], 1 where the position is this rank's.
        seq_ids: [B], negative for a line that takes no part in the step.
        ranks: size of the group.
        slots: length of the cache on this rank, with the reserved slots.

    Returns:
        int64 [B, S].
    """
    written = torch.logical_and(owned.to(torch.bool), (seq_ids >= 0).reshape(-1, 1))
    slot = torch.div(position_ids, ranks, rounding_mode="floor").to(torch.long)
    return torch.where(written, slot, torch.full_like(slot, slots - 1))


def own_block_slots(slots: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """Slots of this rank's part of the block cache, int [B, S]; -1 for what it does not hold.

    Args:
        slots: int [B, S] of the whole block cache, negative for padding.
        rank: this rank's number, int [1].
        ranks: size of the group; divides the block size.
    """
    owned = torch.logical_and(slots >= 0, torch.remainder(slots, ranks) == torch.remainder(rank, ranks).to(slots.dtype))
    return torch.where(owned, torch.div(slots, ranks, rounding_mode="floor"), torch.full_like(slots, -1))


def every_nth(count: int, rank: Tensor, ranks: int) -> Tensor:
    """This rank's of `count` things that lie round the group, int64 [count / ranks]."""
    first = torch.arange(0, count, ranks, device=rank.device)
    return first + torch.remainder(rank, ranks).to(first.dtype)


def own_tokens(entries: tuple[Tensor, Tensor], own: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Of a part's entries, each [B, S, x], this rank's, [B, S / ranks, x]; and the causal mask of all tokens to them.

    Args:
        entries: rotated keys and latents.
        own: int64 [S / ranks], the tokens that this rank attends to: each is one rank's, no matter whose.

    Returns:
        (the entries, bool [1, 1, S, S / ranks]).
    """
    keys, latents = (cache.index_select(1, own) for cache in entries)
    tokens = torch.arange(entries[0].shape[1], device=own.device)
    return (keys, latents), (own <= tokens[:, None])[None, None]
