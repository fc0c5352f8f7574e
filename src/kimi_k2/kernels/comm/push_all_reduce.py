"""Sum over the GPUs of a host for decode sizes: `torch.ops.kimi_k2.push_all_reduce`, for `ops.collective.all_reduce`.

One launch that overlaps with its neighbours; csrc/all_reduce.cu says how the exchange works. Every rank has
memory that its peers push their parts of a sum into. NVLink multicast is not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import load_library
from kimi_k2.kernels.common.hardware import runs_cuda
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import Structure, structure

MAX_RANKS = 8
PACKET = 4  # values that travel in 16 bytes
_BLOCK = 128  # packets of a block


def build() -> None:
    """Have the kernel ready: every rank must before any of them waits for the others.

    Raises:
        KernelError: there is no CUDA compiler, or it fails.
    """
    load_library("comm/all_reduce")


Arguments = structure("comm/csrc/all_reduce.cu", "ReduceArguments")


def supports(x: Tensor, ranks: int) -> bool:
    """BF16 in groups of 4 on a Hopper GPU, 2 to 8 ranks."""
    return x.dtype == torch.bfloat16 and x.numel() % PACKET == 0 and 2 <= ranks <= MAX_RANKS and runs_cuda(x.device)


def mailbox_bytes(values: int, ranks: int) -> int:
    """Size of one rank's mailboxes for sums of up to `values` values."""
    return 2 * ranks * -(-values // PACKET) * 16


def call_counts(values: int, device: torch.device) -> Tensor:
    """int32 zeros, one for each block of a sum of `values` values: the calls so far."""
    return torch.zeros(-(-values // (PACKET * _BLOCK)), dtype=torch.int32, device=device)


def fill_arguments(x: Tensor, out: Tensor, calls: Tensor, mail: Sequence[int], capacity: int, rank: int) -> Structure:
    """The launch's arguments; `push_all_reduce` says what they are."""
    ranks = len(mail)
    around = (ctypes.c_void_p * MAX_RANKS)(*[mail[(rank + step) % ranks] for step in range(ranks)])
    return Arguments(
        x=x, out=out, calls=calls, mail=around, packets=x.numel() // PACKET,
        capacity=capacity // PACKET, rank=rank, ranks=ranks,
    )  # fmt: skip


@kernel_operation(
    "push_all_reduce",
    f"x bf16[*S], calls i32[capacity/{PACKET * _BLOCK}] -> out bf16[*S]; x.numel() % {PACKET} == 0;"
    f" capacity % {PACKET} == 0; x.numel() <= capacity; 2 <= len(mail) <= {MAX_RANKS}; 0 <= rank < len(mail)",
    mutates_args=("calls",),
)
def push_all_reduce(x: Tensor, calls: Tensor, mail: Sequence[int], capacity: int, rank: int, *, out: Tensor) -> None:
    """Sum of x over the ranks, which must make the same calls with the same mailboxes in the same order.

    Args:
        x: this rank's part.
        calls: from `call_counts(capacity, ...)`, counted up.
        mail: address of every rank's mailboxes, each `mailbox_bytes(capacity, ranks)` long and zero before any rank's
            first call.
        capacity: values that a mailbox has room for.
        rank: this rank's place in `mail`.

    Returns:
        The same bits on every rank: summed in float32 in the order of ranks.
    """
    x = x.clone() if x.data_ptr() % 8 else x  # the kernel takes packets of 8 bytes
    arguments = fill_arguments(x, out, calls, mail, capacity, rank)
    launch("comm/all_reduce", "kimi_all_reduce", "push_all_reduce", x.device, arguments)


# Bytes that a rank may push: up to here faster than NCCL on four H200s; other numbers of ranks are taken to be like
# them.
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
        pointers = symmetric.rendezvous(memory, group).buffer_ptrs
        memory.zero_()
        addresses = [int(address) for address in pointers]
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
