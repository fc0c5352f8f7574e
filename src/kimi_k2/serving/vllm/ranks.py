"""What the ranks of a deployment do together.

Tensor-parallel ones agree on what they record: where one does other than the rest, their sums hang. Decode context
parallelism spreads a sequence's cache over them, as vLLM's block tables place it. Data-parallel ones share the routed
experts; each has requests of its own, or none: vLLM then has it run a step over no request beside the others'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.engine.spread import Spread
from kimi_k2.serving.vllm.adapter import Deployment, cp_lse_ag_out_rs
from kimi_k2.serving.vllm.step import Group, tokens_of_replicas


def least_of_ranks(number: int) -> int:
    """Of the numbers that all ranks call this with. The devices take no part."""
    tp = Group("tp")
    if tp.size == 1:
        return number
    least = torch.tensor(int(number), device="cpu")  # vLLM makes models under a device of its choice
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=tp.on_host)
    return int(least)


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


class ContextRanks(Spread):
    """Of vLLM's group. What ranks make is joined by vLLM's own kernel, which there is on a GPU alone."""

    def join(self, summed: Tensor, lse: Tensor) -> Tensor:
        """See `Spread`."""
        if not summed.is_cuda:
            return super().join(summed, lse)
        joined: Tensor = cp_lse_ag_out_rs(summed, lse, Group("dcp").of, is_lse_base_on_e=True)
        return joined


def context_ranks(it: Deployment) -> ContextRanks | None:
    """As a deployment says; None where every rank has whole sequences."""
    if it.spread == 1:
        return None
    group = Group("dcp")
    return ContextRanks(group.size, group.rank, int(it.spread_by), group.gather, group.sum)


class Exchange:
    """Of tokens at the routed experts among the data-parallel ranks of a step, of each its own number of rows."""

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Of each tensor [T, n] all ranks' rows, one rank's behind the other's."""
        group, sizes = Group("dp"), tokens_of_replicas()
        if tensors[0].is_cuda:
            # NCCL reads them as they lie: the plain router's indices are part of wider rows.
            return group.gather_rows([tensor.contiguous() for tensor in tensors], sizes)
        mine, gathered = _mine(group, sizes), []
        for tensor in tensors:
            rows = tensor.new_zeros(sum(sizes), *tensor.shape[1:])
            rows[mine] = tensor
            dist.all_reduce(rows, group=group.on_device)
            gathered.append(rows)
        return gathered

    def scatter(self, rows: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' [sum of T, H]."""
        group, sizes = Group("dp"), tokens_of_replicas()
        if rows.is_cuda:
            return group.scatter_rows(rows, sizes)
        dist.all_reduce(rows, group=group.on_device)
        return rows[_mine(group, sizes)]


def _mine(group: Group, sizes: list[int]) -> slice:
    ends = [0, *itertools.accumulate(sizes)]
    return slice(ends[group.rank], ends[group.rank + 1])
