"""The communicator between processes of the host: mailboxes in shared memory, the kernel over the stand-in for CUDA.

A GPU adds the memory that its peers can reach; sizes, addresses, counts and the way to the group are as they are there.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kimi_k2.kernels.build import SOURCES
from kimi_k2.kernels.push_all_reduce import MAX_RANKS, fill_arguments, mailbox_bytes
from kimi_k2.parallel import all_reduce
from kimi_k2.parallel.all_reduce import AllReduce

COMPILER = shutil.which("g++")
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-DKIMI_K2_CUDA_ON_CPU", "-x", "c++")
STAND_IN = Path(__file__).parents[1] / "kernels" / "all_reduce_on_cpu.h"
PUSHED = 2**14  # bytes; of two ranks 8192 values, of three 4096


def part(rank: int, call: int, values: int) -> Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(100 * rank + call)).bfloat16()


def patched(library: str, boxes: list[Tensor], pushes: list[int]) -> dict[str, Any]:
    """Names of `parallel.all_reduce` that a GPU would serve."""
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
        "supports": lambda x, ranks: x.dtype == torch.bfloat16,
        "push_all_reduce": push,
        "importlib": SimpleNamespace(import_module=lambda name: symmetric),
        "PUSH_BYTES": PUSHED,
    }


def run_rank(rank: int, ranks: int, library: str, rendezvous: str, boxes: list[Tensor], found: Tensor) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    pushes: list[int] = []
    for name, value in patched(library, boxes, pushes).items():
        setattr(all_reduce, name, value)
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    reduce, plain = AllReduce(None), AllReduce(None, push=False)
    capacity = PUSHED // (ranks - 1) // 2
    for call, values in enumerate((capacity, 12, capacity)):
        found[rank, call, :values] = reduce(part(rank, call, values).view(2, -1)).view(-1)
    assert pushes == [capacity, 12, capacity]
    # Too long, of another dtype, or asked not to: all go to the process group.
    for x, by in ((part(rank, 3, capacity + 4), reduce), (torch.ones(8), reduce), (part(rank, 4, 8), plain)):
        others = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(others, x)
        assert torch.allclose(by(x.clone()).float(), torch.stack(others).float().sum(0), atol=0.05)
    assert len(pushes) == 3
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if COMPILER is None:
        pytest.skip("needs g++")
    out = tmp_path_factory.mktemp("all_reduce") / "all_reduce.so"
    command = [COMPILER, *FLAGS, "-include", STAND_IN, "-o", out, SOURCES / "all_reduce.cu"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(out)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree(library: str, tmp_path: Path, ranks: int) -> None:
    capacity = PUSHED // (ranks - 1) // 2
    dirty = [torch.full((mailbox_bytes(capacity, ranks),), 1, dtype=torch.uint8) for _ in range(ranks)]
    boxes = [box.share_memory_() for box in dirty]
    found = torch.full((ranks, 3, capacity), float("nan"), dtype=torch.bfloat16).share_memory_()
    arguments = (ranks, library, str(tmp_path / "rendezvous"), boxes, found)
    mp.start_processes(run_rank, arguments, nprocs=ranks, start_method="fork")
    for call, values in enumerate((capacity, 12, capacity)):
        wanted = sum((part(rank, call, values).double() for rank in range(ranks)), torch.zeros(()).double())
        for rank in range(ranks):
            assert torch.equal(found[rank, call, :values], found[0, call, :values])
        assert ((found[0, call, :values].double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("failure", all_reduce.UNREACHABLE)
def test_unreachable_memory_falls_back(failure: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise failure("no symmetric memory")

    calls: list[Callable[..., Any]] = []
    group = SimpleNamespace(size=lambda: MAX_RANKS)
    monkeypatch.setattr(all_reduce, "supports", lambda x, ranks: True)
    monkeypatch.setattr(all_reduce, "make_mailboxes", fails)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: calls.append(x))
    reduce = AllReduce(group)  # type: ignore[arg-type]
    for _ in range(2):
        reduce(torch.ones(8))
    assert len(calls) == 2
    assert not reduce.push
