"""What the tensor-parallel ranks of a deployment agree on: where one does other than the rest, their sums hang."""

from __future__ import annotations

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group


def least_of_ranks(number: int) -> int:
    """Of the numbers that all ranks call this with. The devices take no part."""
    tp = get_tp_group()
    if tp.world_size == 1:
        return number
    found = torch.tensor(int(number), device="cpu")  # vLLM makes models under a device of its choice
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=tp.cpu_group)
    return int(found)
