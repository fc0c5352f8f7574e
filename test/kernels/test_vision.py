"""The tower's kernels as far as a CPU can run them: schedules."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.kernels.vision.packed_attention import KEYS, QUERIES, schedule
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
    found: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for query, queries, key, keys, head, slot in parts:
        assert keys > 0
        found.setdefault((query, queries, head), []).append((key, keys, slot))
    assert len(found) == heads * len(tiles)
    joins = {(query, queries, head): (slot, number) for query, queries, head, slot, number in work.joins.tolist()}
    slots: list[int] = []
    for query, queries, first, length in tiles.tolist():
        for head in range(heads):
            own = sorted(found[query, queries, head])
            assert [key for key, *_ in own] == [first + sum(keys for _, keys, _ in own[:i]) for i in range(len(own))]
            assert sum(keys for _, keys, _ in own) == length
            assert all(keys % KEYS == 0 for _, keys, _ in own[:-1])
            if len(own) == 1:
                assert own[0][2] == -1 and (query, queries, head) not in joins
            else:
                slot, number = joins[query, queries, head]
                assert [at for *_, at in own] == list(range(slot, slot + number))
                slots += range(slot, slot + number)
    assert sorted(slots) == list(range(work.slots))


def test_blocks_have_equal_shares() -> None:
    """1,376 tiles of 128 steps on 132 SMs: eleven waves would be 1,408 steps, an equal share 1,334.3."""
    for lengths, longest in (([16384], 1345), ([4096, 4096], 178), ([8192, 4096, 2048, 1024, 512, 512], 465)):
        work = schedule(Segments(lengths).tiles(QUERIES), 16, 132)
        steps = (work.parts[:, 3] + KEYS - 1).div(KEYS, rounding_mode="floor")
        owner = torch.arange(132).repeat_interleave(work.starts.diff().long())
        loads = torch.zeros(132, dtype=torch.int).index_add(0, owner, steps.int())
        assert int(loads.max()) <= longest, lengths
    assert schedule(Segments([1024] * 8).tiles(QUERIES), 16, 132).slots == 0, "a join would take longer"
