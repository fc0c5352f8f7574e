"""Sum over ranks: pushed into peers' memory for decode sizes on GPUs, torch.distributed's own otherwise.

NVLink multicast is not used.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.kernels.push_all_reduce import call_counts, mailbox_bytes, push_all_reduce, supports

# Bytes that a rank may push: on four H200s 2^19 to each of three peers take 60 % of NCCL's time, and its ring or tree
# gains with every byte.
PUSH_BYTES = 3 * 2**19
# PyTorch lacks symmetric memory, or the GPUs cannot reach each other's.
UNREACHABLE = (ImportError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Mailboxes:
    """Where the ranks push to.

    Attributes:
        memory: this rank's own, kept alive.
        calls: of this rank so far.
        addresses: of every rank's memory.
        capacity: values that one sum may have.
        rank: this one's place in `addresses`.
    """

    memory: Tensor
    calls: Tensor
    addresses: list[int]
    capacity: int
    rank: int


class AllReduce:
    """Callable sum over the ranks of a group.

    Args:
        group: None for the default one.
        active: False makes it the identity.
        push: False keeps to torch.distributed's all_reduce.
    """

    def __init__(self, group: dist.ProcessGroup | None, active: bool = True, push: bool = True) -> None:
        self.group, self.active, self.push = group, active, push
        self._mailboxes: Mailboxes | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Sum of all ranks' x, of any shape; x may be overwritten."""
        if not self.active:
            return x
        x = x.contiguous()
        group = self.group or dist.group.WORLD
        assert group is not None
        if self.push and supports(x, group.size()):
            boxes = self._mailboxes or self._prepare(group, x.device)
            if boxes is not None and x.numel() <= boxes.capacity:
                return push_all_reduce(x, boxes.calls, boxes.addresses, boxes.capacity, boxes.rank)
        dist.all_reduce(x, group=self.group)
        return x

    def _prepare(self, group: dist.ProcessGroup, device: torch.device) -> Mailboxes | None:
        try:
            self._mailboxes = make_mailboxes(group, device)
        except UNREACHABLE:
            self.push = False
        return self._mailboxes


def make_mailboxes(group: dist.ProcessGroup, device: torch.device) -> Mailboxes:
    """Empty mailboxes for sums of BF16 values of up to PUSH_BYTES a rank; every rank of the group must call this.

    Raises:
        one of UNREACHABLE.
    """
    # Multicast can put GPUs that others share out of service.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    ranks = group.size()
    capacity = PUSH_BYTES // (ranks - 1) // 8 * 4
    memory = symmetric.empty(mailbox_bytes(capacity, ranks), dtype=torch.uint8, device=device)
    addresses = [int(address) for address in symmetric.rendezvous(memory, group).buffer_ptrs]
    memory.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody pushes into what its owner has yet to clear
    return Mailboxes(memory, call_counts(capacity, device), addresses, capacity, group.rank())
