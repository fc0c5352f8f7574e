"""Which block of `packed_attention` computes what: whole tiles in turn, then shares of the rest, cut between keys.

Tiles of one length in turn leave the last wave partly empty: 1,376 of them on 132 SMs take eleven waves for the work
of 10.4. What is left after the full waves is one line of key steps, which the blocks share out; a tile that several of
them have a part of is joined afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Keys of a step, and the queries of a tile: csrc/attention.cuh's kKeys and kQueries.
KEYS, QUERIES = 128, 192
# Steps that beginning and ending a tile takes, the fewest worth a part of their own, and those that the join takes.
TILE_COST, FEWEST, JOIN_COST = 2, 3, 3


@dataclass(frozen=True)
class Schedule:
    """Work of all blocks.

    Attributes:
        parts: int32 [parts, 6]: first query, queries, first key, keys, head, and the slot of the partial sums, -1 where
            the part is a whole tile.
        starts: int32 [blocks + 1]: where each block's parts begin, and the end of the last one's.
        joins: int32 [joined tiles, 5]: first query, queries, head, first slot and number of slots.
        slots: of partial sums, in all.
    """

    parts: Tensor
    starts: Tensor
    joins: Tensor
    slots: int


def schedule(tiles: Tensor, heads: int, blocks: int) -> Schedule:
    """Deal the tiles of all heads out to up to `blocks` blocks.

    Args:
        tiles: int32 [tiles, 4] on the CPU: first query, queries, first key, keys.
    """
    steps = (tiles[:, 3].long() + KEYS - 1).div(KEYS, rounding_mode="floor").repeat(heads)
    cost, blocks = steps + TILE_COST, min(blocks, len(steps))
    waves = -(-len(cost) // blocks)
    loads = torch.zeros(waves * blocks, dtype=torch.long)
    loads[: len(cost)] = cost
    loads = loads.view(waves, blocks).cumsum(0)
    longest, target = int(loads[-1].max()), -(-int(cost.sum()) // blocks)
    whole, room = len(cost), torch.zeros(blocks, dtype=torch.long)
    if longest - target > JOIN_COST + longest // 50:
        full = int((loads.amax(1) <= target).sum())
        whole = full * blocks
        room = target - loads[full - 1] if full else room + target
    item, first, last, block = _cut(steps[whole:], room, blocks)
    item += whole
    item = torch.cat([torch.arange(whole), item])
    first = torch.cat([torch.zeros(whole, dtype=torch.long), first])
    last = torch.cat([steps[:whole], last])
    block = torch.cat([torch.arange(whole) % blocks, block])
    return _laid_out(tiles, item, first, last, block, blocks)


def _cut(steps: Tensor, room: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Item, first and last step, and block of each part of a line of items that fills up the blocks' room in turn."""
    if not len(steps):
        none = torch.zeros(0, dtype=torch.long)
        return none, none.clone(), none.clone(), none.clone()
    ends = (steps + TILE_COST).cumsum(0)
    cuts = room.cumsum(0)[:-1].clamp(max=int(ends[-1]))
    item = torch.searchsorted(ends, cuts, right=True)
    inside = item < len(steps)
    at = item.clamp(max=len(steps) - 1)
    offset = cuts - (ends[at] - steps[at] - TILE_COST)
    offset = torch.where(offset < FEWEST, 0, offset)
    offset = torch.where(offset > steps[at] - FEWEST, steps[at], offset)
    # Places on the line as one number: an item's first step is the end of the item before.
    width = int(steps.max()) + 1
    item, offset = torch.where(offset == steps[at], at + 1, at), torch.where(offset == steps[at], 0, offset)
    item, offset = torch.where(inside, item, len(steps)), torch.where(inside, offset, 0)
    cuts = item * width + offset
    begins = torch.cat([torch.arange(len(steps)) * width, cuts[cuts < len(steps) * width]]).unique()
    block = torch.searchsorted(cuts, begins, right=True)
    item, first = begins // width, begins % width
    following = torch.cat([begins[1:], torch.tensor([len(steps) * width])])
    last = torch.where(following // width == item, following % width, steps[item])
    return item, first, last, block


def _laid_out(tiles: Tensor, item: Tensor, first: Tensor, last: Tensor, block: Tensor, blocks: int) -> Schedule:
    """The parts, in the order of their items, as the kernel reads them."""
    count = len(tiles)
    of, number = torch.unique_consecutive(item, return_counts=True)
    split = (number > 1).repeat_interleave(number)
    slot = torch.where(split, split.cumsum(0) - 1, -1)
    query, queries, key, keys = tiles[item % count].long().unbind(1)
    keys = torch.minimum(keys - first * KEYS, (last - first) * KEYS)
    parts = torch.stack([query, queries, key + first * KEYS, keys, item // count, slot], 1)
    order = torch.sort(block, stable=True).indices
    starts = torch.searchsorted(block[order], torch.arange(blocks + 1))
    joined = number > 1
    begin = number.cumsum(0) - number
    at = begin[joined]
    joins = torch.stack([query[at], queries[at], of[joined] // count, slot[at], number[joined]], 1)
    return Schedule(parts[order].int(), starts.int(), joins.int(), int(split.sum()))
