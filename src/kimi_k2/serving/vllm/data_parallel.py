"""Tokens of all data-parallel ranks at each rank's routed experts: gathered, and the sums scattered again.

Each rank has requests of its own, or none: vLLM then has it run a step over no request beside the others'.
"""

from __future__ import annotations

import itertools

import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_dp_group
from vllm.forward_context import get_forward_context


class Exchange:
    """Among the data-parallel ranks of one step, of each its own number of rows."""

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Of each tensor [T, n] all ranks' rows, one rank's behind the other's."""
        group, sizes = get_dp_group(), self._sizes()
        if tensors[0].is_cuda:
            # NCCL reads them as they lie: the plain router's indices are part of wider rows.
            gathered: list[Tensor] = group.all_gatherv([tensor.contiguous() for tensor in tensors], 0, sizes)
            return gathered
        mine, gathered = self._mine(sizes), []
        for tensor in tensors:
            rows = tensor.new_zeros(sum(sizes), *tensor.shape[1:])
            rows[mine] = tensor
            dist.all_reduce(rows, group=group.device_group)
            gathered.append(rows)
        return gathered

    def scatter(self, rows: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' [sum of T, H]."""
        group, sizes = get_dp_group(), self._sizes()
        if rows.is_cuda:
            scattered: Tensor = group.reduce_scatterv(rows, 0, sizes)
            return scattered
        dist.all_reduce(rows, group=group.device_group)
        return rows[self._mine(sizes)]

    @staticmethod
    def _sizes() -> list[int]:
        sizes: list[int] = get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
        return sizes

    @staticmethod
    def _mine(sizes: list[int]) -> slice:
        ends, rank = [0, *itertools.accumulate(sizes)], get_dp_group().rank_in_group
        return slice(ends[rank], ends[rank + 1])
