"""The communicator between processes of the host: mailboxes in shared memory, the kernel over the stand-in for CUDA.

A GPU adds the memory that its peers can reach; sizes, addresses, counts and the way to the group are as they are there.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machines import NEEDS_COMPILER, compiled
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from kimi_k2.errors import KernelError
from kimi_k2.kernels.comm import entries, push_all_reduce
from kimi_k2.kernels.comm.push_all_reduce import fill_arguments, mailbox_bytes
from kimi_k2.parallel.apply import AllReduce

ON_CPU = "comm/all_reduce", "all_reduce_on_cpu.h"
CALLS = 516, 2048, 4, 1500  # values: sets of mailboxes take turns, blocks idle
PUSHED = 2**14  # bytes; of two ranks 8192 values, of three 4096


def part(rank: int, call: int, values: int) -> Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(100 * rank + call)).bfloat16()


def patched(library: str, boxes: list[Tensor], pushes: list[int]) -> dict[str, Any]:
    """Names of `kernels.comm` that a GPU would serve."""
    function = ctypes.CDLL(library).kimi_all_reduce

    def push(x: Tensor, calls: Tensor, mail: list[int], capacity: int, rank: int) -> Tensor:
        out = torch.full_like(x, float("nan"))
        assert function(ctypes.byref(fill_arguments(x, out, calls, mail, capacity, rank)), None) == 0
        pushes.append(x.numel())
        return out

    symmetric = SimpleNamespace(
        empty=lambda size, dtype, device: boxes[dist.get_rank()][:size],
        rendezvous=lambda memory, group: SimpleNamespace(buffer_ptrs=[box.data_ptr() for box in boxes]),
    )
    return {
        "build": lambda: None,
        "supports": lambda x, ranks: x.dtype == torch.bfloat16,
        "push_all_reduce": push,
        "importlib": SimpleNamespace(import_module=lambda name: symmetric),
        "PUSH_BYTES": PUSHED,
    }


def replace(names: dict[str, Any]) -> None:
    """Put these in, in a process of its own; the table takes its CPU for a GPU."""
    for name, value in names.items():
        setattr(entries if hasattr(entries, name) else push_all_reduce, name, value)
    torch.Tensor.is_cuda = True


def run_rank(rank: int, ranks: int, library: str, rendezvous: str, boxes: list[Tensor], found: Tensor) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    pushes: list[int] = []
    replace(patched(library, boxes, pushes))
    reduce, plain = AllReduce(None), AllReduce(None, push=False)
    capacity = PUSHED // (ranks - 1) // 2
    calls = capacity, *CALLS
    for call, values in enumerate(calls):
        found[rank, call, :values] = reduce(part(rank, call, values).view(2, -1)).view(-1)
    assert pushes == [*calls]
    # Too long, of another dtype, or asked not to: all go to the process group.
    for x, by in ((part(rank, 3, capacity + 4), reduce), (torch.ones(8), reduce), (part(rank, 4, 8), plain)):
        others = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(others, x)
        assert torch.allclose(by(x.clone()).float(), torch.stack(others).float().sum(0), atol=0.05)
    assert len(pushes) == len(calls)
    dist.barrier()
    dist.destroy_process_group()


@NEEDS_COMPILER
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree(tmp_path: Path, ranks: int) -> None:
    capacity = PUSHED // (ranks - 1) // 2
    dirty = [torch.full((mailbox_bytes(capacity, ranks),), 1, dtype=torch.uint8) for _ in range(ranks)]
    boxes = [box.share_memory_() for box in dirty]
    found = torch.full((ranks, 1 + len(CALLS), capacity), float("nan"), dtype=torch.bfloat16).share_memory_()
    arguments = (ranks, compiled(*ON_CPU), str(tmp_path / "rendezvous"), boxes, found)
    start_processes(run_rank, arguments, nprocs=ranks, start_method="fork")
    for call, values in enumerate((capacity, *CALLS)):
        wanted = sum((part(rank, call, values).double() for rank in range(ranks)), torch.zeros(()).double())
        for rank in range(ranks):
            assert torch.equal(found[rank, call, :values], found[0, call, :values])
        assert ((found[0, call, :values].double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all()


def run_without(rank: int, failure: str, library: str, rendezvous: str, boxes: list[Tensor]) -> None:
    """One of two ranks cannot have mailboxes, at one step or the other: both sum by the group."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    pushes: list[int] = []
    replaced = patched(library, boxes, pushes)

    def fails(*arguments: Any, **keywords: Any) -> Any:
        raise KernelError("no compiler") if failure == "build" else RuntimeError("out of memory")

    if failure == "host":
        replaced["host"] = lambda: f"host of rank {rank}"
        replaced["importlib"] = None  # nothing is exchanged
    elif rank == 1 and failure == "build":
        replaced["build"] = fails
    elif rank == 1:
        setattr(replaced["importlib"].import_module("symmetric memory"), failure, fails)
    replace(replaced)
    reduce = AllReduce(None)
    for _ in range(2):
        assert torch.equal(reduce(torch.ones(8, dtype=torch.bfloat16)), torch.full((8,), 2, dtype=torch.bfloat16))
    assert reduce.ranks.kept == {"push": None}
    assert not pushes
    dist.barrier()
    dist.destroy_process_group()


@NEEDS_COMPILER
@pytest.mark.parametrize("failure", ["build", "empty", "rendezvous", "host"])
def test_ranks_fall_back_together(tmp_path: Path, failure: str) -> None:
    boxes = [torch.zeros(mailbox_bytes(PUSHED // 2, 2), dtype=torch.uint8).share_memory_() for _ in range(2)]
    start_processes(
        run_without, (failure, compiled(*ON_CPU), str(tmp_path / "r"), boxes), nprocs=2, start_method="fork"
    )
