"""The tower's kernels as far as a CPU can run them: schedules."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kimi_k2.kernels.vision.packed_attention import FEWEST, KEYS, QUERIES, schedule
from kimi_k2.ops.vision import Segments


def test_tiles_cover_every_token_once() -> None:
    segments = Segments([200, 1, 500, 128])
    tiles = segments.tiles(128).tolist()
    queries = sorted(token for first, count, _, _ in tiles for token in range(first, first + count))
    assert queries == list(range(829))
    keys = {(200, 0), (1, 200), (500, 201), (128, 701)}
    assert {(length, first) for _, _, first, length in tiles} == keys
    assert all(key <= first and first + count <= key + length for first, count, key, length in tiles)
    assert [length for *_, length in tiles] == [500] * 4 + [200] * 2 + [128, 1]
    assert segments.derived("key", list) is segments.derived("key", list)


@pytest.mark.parametrize("blocks", [132, 7, 1])
@pytest.mark.parametrize(
    "lengths", [[16384], [4096, 4096], [1024] * 8, [7, 1024, 1, 300], [2500, 4000], [1], [4] * 50 + [9000]], ids=str
)
def test_blocks_share_out_every_step_once(lengths: list[int], blocks: int) -> None:
    heads, tiles = 3, Segments(lengths).tiles(QUERIES)
    work = schedule(tiles, heads, blocks)
    parts, starts = work.parts.tolist(), work.starts.tolist()
    assert (starts[0], starts[-1]) == (0, len(parts)) and sorted(starts) == starts
    assert len(starts) - 1 == min(blocks, heads * len(tiles))

    def steps(key: int, keys: int) -> list[tuple[int, int]]:
        return [(at, min(KEYS, key + keys - at)) for at in range(key, key + keys, KEYS)]

    wanted, found = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for query, queries, key, keys in tiles.tolist():
        wanted.update((query, queries, head, *step) for head in range(heads) for step in steps(key, keys))
    of_tile: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for query, queries, key, keys, head, slot in parts:
        found.update((query, queries, head, *step) for step in steps(key, keys))
        of_tile.setdefault((query, queries, head), []).append((key, keys, slot))
    assert found == wanted
    joins: dict[tuple[int, ...], tuple[int, int]] = {
        (query, queries, head): (slot, count) for query, queries, head, slot, count in work.joins.tolist()
    }
    for tile, own in of_tile.items():
        own.sort()
        assert all(keys % KEYS == 0 for _, keys, _ in own[:-1])
        assert len(own) == 1 or min(own[0][1], own[-1][1] + KEYS - 1) >= FEWEST * KEYS
        slot, count = joins.pop(tile, (-1, 1))
        assert [at for *_, at in own] == ([-1] if slot < 0 else list(range(slot, slot + count)))
    assert not joins
    assert sorted(slot for *_, slot in parts if slot >= 0) == list(range(work.slots))


def test_blocks_have_equal_shares() -> None:
    """1,376 tiles of 128 steps on 132 SMs: eleven waves would be 1,408 steps, an equal share 1,334.3."""
    for lengths, longest in (([16384], 1345), ([4096, 4096], 178), ([8192, 4096, 2048, 1024, 512, 512], 465)):
        work = schedule(Segments(lengths).tiles(QUERIES), 16, 132)
        steps = (work.parts[:, 3] + KEYS - 1).div(KEYS, rounding_mode="floor")
        owner = torch.arange(132).repeat_interleave(work.starts.diff().long())
        loads = torch.zeros(132, dtype=torch.int).index_add(0, owner, steps.int())
        assert int(loads.max()) <= longest, lengths
    assert schedule(Segments([1024] * 8).tiles(QUERIES), 16, 132).slots == 0, "a join would take longer"
