"""From one decode step of a batch to the next, where sequences lie in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.registry import ELEMENTWISE, operation


@operation(batch_invariant=ELEMENTWISE)
def next_step(
    seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> None:
    """Each sequence gets one new token: written are its length, its position and its slot. Nothing is read back.

    Rows of length 0 are padding: they keep it, and get token and position 0 and a negative slot, so that what they
    compute follows from no earlier step.

    Args:
        seq_lens: int32 [B], tokens in the cache; one more afterwards.
        input_ids: int32 [B], the new tokens.
        positions: int64 [B], written.
        slots: int64 [B], written: where the new token is to be stored, numbered through all pages.
        block_table: int32 [B, pages], pages of each sequence.
        page: slots a page.
    """
    there = seq_lens > 0
    positions.copy_(seq_lens)
    pages = block_table.gather(1, (positions // page).unsqueeze(1)).squeeze(1).long()
    slots.copy_(torch.where(there, pages * page + positions % page, -1))
    seq_lens.add_(there)
    input_ids.mul_(there)
