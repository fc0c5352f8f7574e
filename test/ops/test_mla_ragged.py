"""Attention of several sequences one after the other, against sums written out in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from kimi_k2.ops.mla import Ragged, mla_ragged_attention

HEADS, NOPE, ROPE, VALUE, RANK, SCALE = 2, 6, 4, 5, 8, 0.3


@pytest.mark.parametrize(("new", "lengths"), [((3, 1, 7), (3, 1, 7)), ((2, 4, 1), (9, 4, 6)), ((2, 0, 3), (2, 5, 8))])
def test_each_sequence_sees_its_own_slots(new: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    torch.manual_seed(len(new))
    rows, total = sum(new), sum(lengths)
    nope, rope = torch.randn(rows, HEADS, NOPE).double(), torch.randn(rows, HEADS, ROPE).double()
    slots, kv_b = torch.randn(total, RANK + ROPE).double(), torch.randn(HEADS, NOPE + VALUE, RANK).double()
    queries, keys = (Ragged(of, torch.tensor([0, *itertools.accumulate(of)]).int()) for of in (new, lengths))
    found = mla_ragged_attention(nope, rope, slots, kv_b, queries, keys, SCALE)
    row = first = 0
    for count, length in zip(new, lengths, strict=True):
        for number in range(count):
            seen = slots[first : first + length - count + number + 1]
            for head in range(HEADS):
                key = seen[:, :RANK] @ kv_b[head, :NOPE].T
                weights = (SCALE * (key @ nope[row, head] + seen[:, RANK:] @ rope[row, head])).softmax(0)
                wanted = weights @ (seen[:, :RANK] @ kv_b[head, NOPE:].T)
                torch.testing.assert_close(found[row, head], wanted, rtol=1e-10, atol=1e-12)
            row += 1
        first += length
