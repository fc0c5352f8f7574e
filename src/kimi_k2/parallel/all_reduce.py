"""Sum over ranks: one-shot over peer memory for decode sizes on GPUs, torch.distributed's own otherwise.

One-shot: each rank writes its part to a buffer that its peers can read, and adds all parts itself: one launch and one
exchange of latencies. NVLink multicast is not used.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Beyond this, reading every peer's whole part costs more than NCCL's ring or tree.
ONE_SHOT_BYTES = 2**19


class AllReduce:
    """Callable sum over the ranks of a group.

    Args:
        group: None for the default one.
        active: False makes it the identity.
        one_shot: False keeps to torch.distributed's all_reduce.
    """

    def __init__(self, group: dist.ProcessGroup | None, active: bool = True, one_shot: bool = True) -> None:
        self.group, self.active, self.one_shot = group, active, one_shot
        self._buffers: dict[tuple[torch.dtype, int], Any] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Sum of all ranks' x, of any shape; x may be overwritten."""
        if not self.active:
            return x
        if self.one_shot and x.is_cuda and x.nbytes <= ONE_SHOT_BYTES and x.nbytes % 16 == 0:
            buffer = self._buffer(x)
            if buffer is not None:
                buffer.copy_(x.reshape(-1))
                name = (self.group or dist.group.WORLD).group_name  # type: ignore[union-attr]
                return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", name).view(x.shape)
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def _buffer(self, x: Tensor) -> Tensor | None:
        key = (x.dtype, x.numel())
        if key not in self._buffers:
            self._buffers[key] = self._allocate(x)
        found: Tensor | None = self._buffers[key]
        return found

    def _allocate(self, x: Tensor) -> Tensor | None:
        # Multicast can put GPUs that others share out of service.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        try:
            symmetric = importlib.import_module("torch.distributed._symmetric_memory")
            buffer: Tensor = symmetric.empty(x.numel(), dtype=x.dtype, device=x.device)
            symmetric.rendezvous(buffer, self.group or dist.group.WORLD)
        except (ImportError, AttributeError, RuntimeError):
            self.one_shot = False
            return None
        return buffer
