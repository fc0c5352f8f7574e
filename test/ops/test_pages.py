"""From one decode step to the next: what each sequence, one by one, would be told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k2.ops.mla import next_step


def drawn(lengths: list[int], page: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors of a batch whose pages have been drawn; all that is to be written holds something else."""
    torch.manual_seed(len(lengths))
    batch, wide = len(lengths), max(lengths) // page + 1
    ids = torch.randint(1, 1000, (batch,), dtype=torch.int32)
    table = (torch.randperm(2 * batch * wide)[: batch * wide] + 1).view(batch, wide).int()
    return torch.tensor(lengths, dtype=torch.int32), ids, torch.full((batch,), 77), torch.full((batch,), 77), table


@pytest.mark.parametrize("lengths", [[1], [63, 64, 65, 0, 127, 128, 0], [5000]])
def test_each_sequence_has_its_next_slot(lengths: list[int]) -> None:
    seq_lens, input_ids, positions, slots, table = drawn(lengths, page=64)
    ids, pages = input_ids.tolist(), table.tolist()
    next_step(seq_lens, input_ids, positions, slots, table, 64)
    assert seq_lens.tolist() == [length + 1 if length else 0 for length in lengths]
    assert positions.tolist() == lengths
    assert input_ids.tolist() == [one if length else 0 for one, length in zip(ids, lengths, strict=True)]
    held = [row[length // 64] * 64 + length % 64 for row, length in zip(pages, lengths, strict=True)]
    assert slots.tolist() == [slot if length else -1 for slot, length in zip(held, lengths, strict=True)]
