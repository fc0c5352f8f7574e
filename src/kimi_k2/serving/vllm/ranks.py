"""What the tensor-parallel ranks of a deployment agree on: where one does other than the rest, their sums hang."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group


def least_of_ranks(number: int) -> int:
    """Of the numbers that all ranks call this with. The devices take no part."""
    tp = get_tp_group()
    if tp.world_size == 1:
        return number
    found = torch.tensor(int(number), device="cpu")  # vLLM makes models under a device of its choice
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=tp.cpu_group)
    return int(found)


def connect(
    exchanges: Iterable[tuple[Callable[[Tensor], Tensor], int, torch.dtype]],
    device: torch.device,
    sizes: Sequence[int],
) -> None:
    """Exchange rows of zeros of each size with all ranks, which all must call this; the largest first.

    A library makes its connections when it first exchanges a size. Behind this no rank waits for another while graphs
    are recorded, so that one which fails keeps nobody waiting.

    Args:
        exchanges: what the ranks do together; of how many columns, and of which dtype.
        device: of the rows.
        sizes: numbers of rows, ascending.
    """
    for exchange, columns, dtype in exchanges:
        for size in reversed(sizes):
            exchange(torch.zeros(size, columns, dtype=dtype, device=device))
