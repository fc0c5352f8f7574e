"""Points of a model that is divided over ranks, put together as one rank would have them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from kimi_k2.ops.collective import gather_last

# Outputs of which each rank has its heads' columns, and those of which it has its share of every sum.
_COLUMNS = (".self_attn.q_b_proj", ".self_attn.attention")
_SUMMANDS = (".self_attn.o_proj", ".mlp.shared_experts")


def combine(point: str, value: Tensor) -> Tensor:
    """The whole of a point's rows from this rank's part; every rank must ask for the same points in the same order."""
    if not dist.is_initialized():
        return value
    if point.endswith(_COLUMNS):
        return gather_last(value, None)
    if point.endswith(_SUMMANDS):
        value = value.clone()
        dist.all_reduce(value)
    return value
