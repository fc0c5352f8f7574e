"""Rotation and attention within segments by our own kernel for Hopper: `torch.ops.kimi_k2.packed_attention`.

Heads of 72 values are what other kernels pad to 80, 96 or 128; csrc/attention.cuh says how this one works.

Blocks compute whole tiles in turn, then shares of the rest, cut between keys. Tiles of one length in turn leave the
last wave partly empty: 1,376 of them on 132 SMs take eleven waves for the work of 10.4. What is left after the full
waves is one line of key steps, which the blocks share out; a tile that several of them have a part of is joined
afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.ops.vision import Segments, uploaded

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


HEAD = 72
# Tokens past the last one that tiles may touch.
PADDING = QUERIES
# Values of csrc/attention.cuh's Sums: a row's 72 and two more, for a tile's queries.
SUMS = QUERIES * (HEAD + 2)


def supports(qkv: Tensor, cos: Tensor, sin: Tensor, segments: Segments, softmax_scale: float) -> bool:
    """BF16 heads of 72 values on compute capability 9.0, nvcc, nothing to differentiate."""
    return rotate_and_pack.takes(qkv, cos, sin) and not (torch.is_grad_enabled() and qkv.requires_grad)


def rotated_attention(qkv: Tensor, cos: Tensor, sin: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
    """`ops.vision.rotated_attention` with the plain function's arguments."""
    packed = rotate_and_pack(qkv, cos, sin)
    work = scheduled(segments, qkv.shape[2], qkv.device)
    return packed_attention(packed, work.parts, work.starts, work.joins, work.slots, qkv.shape[0], softmax_scale)


def scheduled(segments: Segments, heads: int, device: torch.device) -> Schedule:
    """The schedule of a pack on the device, kept with its segments."""
    _, sms = hopper(device.index, "packed_attention")

    def make() -> Schedule:
        work = schedule(segments.tiles(QUERIES), heads, sms)
        parts, starts, joins = (uploaded(part, device) for part in (work.parts, work.starts, work.joins))
        return Schedule(parts, starts, joins, work.slots)

    return segments.derived((schedule, heads, device), make)


ROTATED = f"qkv bf16[T,3,H,{HEAD}] rows16, cos f32[T,1,{HEAD // 2}], sin f32[T,1,{HEAD // 2}]"


def capacity(tokens: int) -> int:
    """Tokens that `rotate_and_pack` makes room for: tiles may end past the last one."""
    return -(-(tokens + PADDING) // 8) * 8


@kernel_operation(
    "vision_rotate_and_pack",
    f"{ROTATED} -> packed bf16[3,H,{HEAD // 8},C,8]; qkv.stride()[1:] == ({HEAD} * H, {HEAD}, 1)",
    also=lambda T: {"C": capacity(T)},
)
def rotate_and_pack(qkv: Tensor, cos: Tensor, sin: Tensor, *, packed: Tensor) -> None:
    """Queries and keys rotated, all three in the order that `packed_attention` reads.

    Returns:
        bfloat16 [3, H, 9, `capacity(T)`, 8]: of each head's groups of 8 values all tokens, then zeros.
    """
    sizes = qkv.shape[0], qkv.shape[2], packed.shape[3], qkv.stride(0)
    launch("vision/attention", "kimi_vision_pack", "rotate_and_pack", qkv.device, qkv, cos, sin, packed, *sizes)


@kernel_operation(
    "vision_packed_attention",
    f"packed bf16[3,H,{HEAD // 8},C,8], parts i32[P,6], starts i32[S], joins i32[J,5] -> out bf16[tokens,H,{HEAD}];"
    f" C == (tokens + {PADDING + 7}) // 8 * 8",
)
def packed_attention(
    packed: Tensor,
    parts: Tensor,
    starts: Tensor,
    joins: Tensor,
    slots: int,
    tokens: int,
    softmax_scale: float,
    *,
    out: Tensor,
) -> None:
    """Attention of each tile's queries to its keys.

    Args:
        packed: as `rotate_and_pack` makes it.
        parts, starts, joins, slots: the pack's `Schedule`.
    """
    sums = torch.empty(slots, SUMS, dtype=torch.float32, device=packed.device)
    sizes = starts.shape[0] - 1, joins.shape[0], packed.shape[1], packed.shape[3]
    operands = packed, parts, starts, joins, sums, out
    launch(
        "vision/attention", "kimi_vision_attention", "packed_attention", packed.device, *operands, *sizes,
        float(softmax_scale),
    )  # fmt: skip
