"""Memory of every rank that its peers push their parts of a sum into. NVLink multicast is not used."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.comm.push_all_reduce import build, call_counts, mailbox_bytes

# Bytes that a rank may push: up to here faster than NCCL on four H200s (`bench.kernels.all_reduce`); other numbers of
# ranks are taken to be like them.
PUSH_BYTES = 3 * 2**19
# PyTorch lacks symmetric memory, the GPUs cannot reach each other's or have none left, there is no CUDA compiler.
UNREACHABLE = (ImportError, AttributeError, RuntimeError, KernelError)


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


def make_mailboxes(group: dist.ProcessGroup, device: torch.device) -> Mailboxes | None:
    """Empty mailboxes for sums of BF16 values of up to PUSH_BYTES a rank; every rank of the group must call this.

    Returns:
        None, on all ranks, if one of them cannot have them or is on another host.
    """
    # Multicast can put GPUs that others share out of service.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    ranks = group.size()
    capacity = PUSH_BYTES // (ranks - 1) // 8 * 4
    if not on_one_host(group, device):  # addresses are exchanged over a host's own sockets: some would wait for ever
        return None
    memory = addresses = None
    with contextlib.suppress(*UNREACHABLE):
        build()
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        memory = symmetric.empty(mailbox_bytes(capacity, ranks), dtype=torch.uint8, device=device)
    if not all_ranks(memory is not None, group, device) or memory is None:
        return None
    with contextlib.suppress(*UNREACHABLE):
        found = symmetric.rendezvous(memory, group).buffer_ptrs
        memory.zero_()
        addresses = [int(address) for address in found]
    # Also the barrier: nobody pushes into what its owner has yet to clear.
    if not all_ranks(addresses is not None, group, device) or addresses is None:
        return None
    return Mailboxes(memory, call_counts(capacity, device), addresses, capacity, group.rank())


def host() -> str:
    """Which machine this is; two containers of it are two."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return f"{socket.gethostname()} {boot}"


def on_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks, which all must ask, are processes of one host."""
    number = zlib.crc32(host().encode())
    least = torch.tensor([number, -number], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return bool(least[0] == -least[1])


def all_ranks(ready: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether it holds for every rank, once all have come here and done what they gave their devices before."""
    flag = torch.tensor(int(ready), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)
