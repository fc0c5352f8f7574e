"""What a step's layers are told of several prompts: their rows, and the slots of each in their order."""

from __future__ import annotations

import itertools

import pytest
import torch

from kimi_k2.engine import batch as module
from kimi_k2.engine.batch import Batch, Chunk, RaggedChunk, by_token
from kimi_k2.ops.mla import gather_pages

PAGE = 4


def batch(new: list[int], lengths: list[int], decodes: int) -> Batch:
    starts = [0, *itertools.accumulate(new)]
    table = (torch.randperm(60) + 1)[: 6 * len(new)].view(len(new), 6).int()
    slots = [
        table[row, place // PAGE] * PAGE + place % PAGE
        for row, (count, length) in enumerate(zip(new, lengths, strict=True))
        for place in range(length - count, length)
    ]
    return Batch.of_sequences(
        starts, torch.tensor(starts).int(), torch.tensor(lengths).int(), lengths[decodes:], table, torch.tensor(slots),
        PAGE,
    )  # fmt: skip


@pytest.mark.parametrize(("new", "lengths"), [([1, 1, 3, 5, 2], [9, 4, 12, 5, 20]), ([2, 7, 3], [2, 9, 17])])
def test_slots_of_sequences_whose_tokens_are_not_all_new(new: list[int], lengths: list[int]) -> None:
    torch.manual_seed(sum(new))
    decodes = new.count(1)
    made = batch(new, lengths, decodes)
    (together,) = made.chunks
    assert isinstance(together, RaggedChunk)
    assert together.places is not None and made.block_table is not None
    assert (made.decodes, made.tokens, together.rows) == (decodes, sum(new), slice(decodes, sum(new)))
    cache = torch.randn(61, PAGE, 3)
    table = made.block_table[decodes:]
    wanted = [gather_pages(cache, table[row : row + 1], length)[0] for row, length in enumerate(lengths[decodes:])]
    assert torch.equal(cache[together.places], torch.cat(wanted))
    assert together.queries.lengths == tuple(new[decodes:])
    assert together.queries.starts.tolist() == [0, *itertools.accumulate(new[decodes:])]
    assert together.keys.lengths == tuple(lengths[decodes:])
    assert together.keys.starts.tolist() == [0, *itertools.accumulate(lengths[decodes:])]
    assert together.keys.starts.dtype == together.queries.starts.dtype == torch.int32


def test_whole_prompts_need_no_slots() -> None:
    (together,) = batch([1, 3, 5], [4, 3, 5], 1).chunks
    assert isinstance(together, RaggedChunk)
    assert together.places is None
    assert together.keys is together.queries


def test_one_prompt_and_very_long_ones_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = batch([1, 3], [4, 9], 1).chunks
    assert isinstance(alone, Chunk) and alone.positions.tolist() == [[6, 7, 8]]
    assert alone[:2] == (slice(1, 4), slice(1, 2)) and alone[3:] == (9, True)
    monkeypatch.setattr(module, "MOST_SLOTS", 13)
    apart = batch([3, 2], [9, 5], 0).chunks
    assert [(one.rows, type(one)) for one in apart] == [(slice(0, 3), Chunk), (slice(3, 5), Chunk)]


def test_several_new_tokens_as_sequences_of_their_own() -> None:
    """Behind them a sequence without a token, and two rows of padding."""
    starts, lengths = torch.tensor([0, 3, 4, 6, 6]).int(), torch.tensor([9, 1, 2, 0]).int()
    table = torch.arange(8).view(4, 2).int()
    seq_lens, tables = by_token(starts, lengths, table, 8)
    assert seq_lens.tolist() == [7, 8, 9, 1, 1, 2, 0, 0]
    assert tables[:6, 0].tolist() == [0, 0, 0, 2, 4, 4]
    assert seq_lens.dtype == tables.dtype == torch.int32
