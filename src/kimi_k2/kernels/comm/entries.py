"""The pushed sum in the table of operations, with the plain function's arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.comm.push_all_reduce import Mailboxes, make_mailboxes, push_all_reduce, supports
from kimi_k2.ops import collective
from kimi_k2.ops.collective import Ranks

PUSH = "push"


def mailboxes(ranks: Ranks, device: torch.device) -> Mailboxes | None:
    """Those of the ranks, which all ask for them at their first sum; None if one of them cannot have them."""
    if PUSH not in ranks.kept:
        ranks.kept[PUSH] = make_mailboxes(ranks.process_group, device)
    return ranks.kept[PUSH]


def _supports_push(x: Tensor, ranks: Ranks) -> bool:
    """BF16 sums of decode sizes, where the ranks reach each other's memory."""
    if not ranks.push or not supports(x, ranks.process_group.size()):
        return False
    boxes = mailboxes(ranks, x.device)
    return boxes is not None and x.numel() <= boxes.capacity


@collective.all_reduce.entry(PUSH, takes=_supports_push, batch_invariant="added in the order of ranks")
def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """`push_all_reduce` into the ranks' mailboxes."""
    boxes = mailboxes(ranks, x.device)
    assert boxes is not None
    return push_all_reduce(x, boxes.calls, boxes.addresses, boxes.capacity, boxes.rank)
