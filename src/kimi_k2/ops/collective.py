"""What ranks do together: sums, and parts put side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.ops.registry import batch_invariant, operation


@dataclass(eq=False)
class Ranks:
    """The ranks of a sum.

    Attributes:
        group: None for the default one.
        push: False keeps to torch.distributed's all_reduce.
        kept: what an entry keeps for these ranks from call to call, by its name.
    """

    group: dist.ProcessGroup | None = None
    push: bool = True
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself."""
        group = self.group or dist.group.WORLD
        assert group is not None
        return group


@operation(batch_invariant="gathered, then added in the order of ranks")
def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Sum of all ranks' x, of any shape, contiguous; x may be overwritten. Every rank must make the same calls.

    In batch-invariant mode a library's own sum does not serve: which rank it begins with differs along x, by its size.
    """
    if batch_invariant():
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(ranks.group))]
        dist.all_gather(parts, x, group=ranks.group)
        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for part in parts:
            total += part
        return x.copy_(total)
    dist.all_reduce(x, group=ranks.group)
    return x


@operation(batch_invariant="nothing is added")
def gather_last(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate every rank's [..., n] along the last dimension."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
