"""Decode context parallelism: a sequence's cache spread over tensor-parallel ranks, as vLLM's block tables place it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.distributed.parallel_state import get_dcp_group

try:
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs
except ImportError:  # its place in older versions
    from vllm.v1.attention.ops.common import cp_lse_ag_out_rs

from kimi_k2.engine.spread import Spread


class ContextRanks(Spread):
    """Of vLLM's group. What ranks make is joined by vLLM's own kernel, which there is on a GPU alone."""

    def join(self, summed: Tensor, lse: Tensor) -> Tensor:
        """See `Spread`."""
        if not summed.is_cuda:
            return super().join(summed, lse)
        joined: Tensor = cp_lse_ag_out_rs(summed, lse, get_dcp_group(), is_lse_base_on_e=True)
        return joined


def context_ranks(parallel: Any) -> ContextRanks | None:
    """As a deployment's parallel configuration says; None where every rank has whole sequences."""
    if parallel.decode_context_parallel_size == 1:
        return None
    group, run = get_dcp_group(), int(parallel.cp_kv_cache_interleave_size)
    return ContextRanks(group.world_size, group.rank_in_group, run, lambda x: _all(group, x), group.all_reduce)


def _all(group: Any, x: Tensor) -> Tensor:
    gathered: Tensor = group.all_gather(x.contiguous(), 0)
    return gathered
