"""Sum over ranks: pushed into peers' memory for decode sizes on GPUs, torch.distributed's own otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from kimi_k2.ops.collective import Ranks, all_reduce


class AllReduce:
    """Callable sum over the ranks of a group.

    Args:
        group: None for the default one.
        active: False makes it the identity.
        push: False keeps to torch.distributed's all_reduce.
    """

    def __init__(self, group: dist.ProcessGroup | None, active: bool = True, push: bool = True) -> None:
        self.ranks, self.active = Ranks(group, push), active

    def __call__(self, x: Tensor) -> Tensor:
        """Sum of all ranks' x, of any shape; x may be overwritten."""
        return all_reduce(x.contiguous(), self.ranks) if self.active else x

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The identity meanwhile: what a rank tries by itself waits for no other."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active
