"""Sum over ranks: over peer memory for decode sizes on GPUs, torch.distributed's own otherwise.

Peer memory: for few BF16 values each rank pushes its part into its peers' memory (`kernels.push_all_reduce`); other
dtypes and sizes take PyTorch's one-shot sum, for which each rank reads its peers' parts. NVLink multicast is not used.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.kernels.push_all_reduce import call_counts, mailbox_bytes, push_all_reduce, supports

# Beyond this, pushing data with as many bytes of call numbers costs more than reading it.
PUSH_BYTES = 2**17
# Beyond this, reading every peer's whole part costs more than NCCL's ring or tree.
ONE_SHOT_BYTES = 2**19
# PyTorch lacks symmetric memory, or the GPUs cannot reach each other's.
UNREACHABLE = (ImportError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Mailboxes:
    """Where the ranks push to: this rank's own memory, kept alive, its calls so far, and every rank's address."""

    memory: Tensor
    calls: Tensor
    addresses: list[int]


class AllReduce:
    """Callable sum over the ranks of a group.

    Args:
        group: None for the default one.
        active: False makes it the identity.
        one_shot: False keeps to torch.distributed's all_reduce.
        push_bytes: the largest sum that is pushed; 0 leaves all to PyTorch.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        active: bool = True,
        one_shot: bool = True,
        push_bytes: int = PUSH_BYTES,
    ) -> None:
        self.group, self.active, self.one_shot, self.push_bytes = group, active, one_shot, push_bytes
        self._buffers: dict[tuple[torch.dtype, int], Tensor] = {}
        self._mailboxes: Mailboxes | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Sum of all ranks' x, of any shape; x may be overwritten."""
        if not self.active:
            return x
        x = x.contiguous()
        if self.one_shot and x.is_cuda and x.nbytes <= ONE_SHOT_BYTES and x.nbytes % 16 == 0:
            group = self.group or dist.group.WORLD
            assert group is not None
            pushes = x.nbytes <= self.push_bytes and supports(x, group.size())
            if pushes and (boxes := self._mailboxes or self._prepare(group, x.device)) is not None:
                return push_all_reduce(x, boxes.calls, boxes.addresses, self.push_bytes // 2, group.rank())
            if not pushes and (buffer := self._buffer(x, group)) is not None:
                buffer.copy_(x.view(-1))
                return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name).view(x.shape)
        dist.all_reduce(x, group=self.group)
        return x

    def _prepare(self, group: dist.ProcessGroup, device: torch.device) -> Mailboxes | None:
        try:
            self._mailboxes = make_mailboxes(self.push_bytes // 2, group, device)
        except UNREACHABLE:
            self.one_shot = False
        return self._mailboxes

    def _buffer(self, x: Tensor, group: dist.ProcessGroup) -> Tensor | None:
        key = (x.dtype, x.numel())
        if key not in self._buffers:
            try:
                self._buffers[key], _ = share(x.numel(), x.dtype, group, x.device)
            except UNREACHABLE:
                self.one_shot = False
        return self._buffers.get(key)


def share(count: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, list[int]]:
    """Memory of this rank that its peers can use, and the address of every rank's.

    Raises:
        one of UNREACHABLE.
    """
    # Multicast can put GPUs that others share out of service.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    memory = symmetric.empty(count, dtype=dtype, device=device)
    return memory, [int(address) for address in symmetric.rendezvous(memory, group).buffer_ptrs]


def make_mailboxes(values: int, group: dist.ProcessGroup, device: torch.device) -> Mailboxes:
    """Empty mailboxes for sums of up to `values` BF16 values; every rank of the group must call this.

    Raises:
        one of UNREACHABLE.
    """
    memory, addresses = share(mailbox_bytes(values, group.size()), torch.uint8, group, device)
    memory.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody pushes into what its owner has yet to clear
    return Mailboxes(memory, call_counts(values, device), addresses)
