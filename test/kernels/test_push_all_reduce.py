"""The pushed sum: its kernel on the host between processes that share the mailboxes, its checks and its fake."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.spawn import start_processes

from kimi_k2.errors import KernelError
from kimi_k2.kernels.comm.push_all_reduce import call_counts, fill_arguments, mailbox_bytes, push_all_reduce

CAPACITY = 2048
SIZES = (2048, 516, 2048, 4, 1500)  # values of one call after another: sets of mailboxes take turns, blocks idle


def part(rank: int, call: int, values: int) -> Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(100 * rank + call)).bfloat16()


def run_rank(rank: int, ranks: int, library: str, boxes: list[Tensor], found: Tensor) -> None:
    function = ctypes.CDLL(library).kimi_all_reduce
    calls = call_counts(CAPACITY, torch.device("cpu"))
    for call, values in enumerate(SIZES):
        x, out = part(rank, call, values), torch.full((values,), float("nan"), dtype=torch.bfloat16)
        mail = [box.data_ptr() for box in boxes]
        assert function(ctypes.byref(fill_arguments(x, out, calls, mail, CAPACITY, rank)), None) == 0
        found[rank, call, :values] = out


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_on_the_sum(all_reduce_on_cpu: str, ranks: int) -> None:
    boxes = [torch.zeros(mailbox_bytes(CAPACITY, ranks), dtype=torch.uint8).share_memory_() for _ in range(ranks)]
    found = torch.full((ranks, len(SIZES), CAPACITY), float("nan"), dtype=torch.bfloat16).share_memory_()
    start_processes(run_rank, (ranks, all_reduce_on_cpu, boxes, found), nprocs=ranks, start_method="fork")
    for call, values in enumerate(SIZES):
        wanted = sum(part(rank, call, values).double() for rank in range(ranks))
        assert isinstance(wanted, Tensor)
        for rank in range(ranks):
            assert torch.equal(found[rank, call, :values], found[0, call, :values])
        # One rounding to BF16, and float32's.
        assert ((found[0, call, :values].double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize(
    ("values", "dtype", "ranks", "rank", "message"),
    [
        (8, torch.float32, 2, 0, "x is torch.float32"),
        (6, torch.bfloat16, 2, 0, "multiple of 4"),
        (CAPACITY + 4, torch.bfloat16, 2, 0, f"up to {CAPACITY}"),
        (8, torch.bfloat16, 2, 2, "rank 2 of 2"),
        (8, torch.bfloat16, 9, 0, "rank 0 of 9"),
    ],
)
def test_what_it_refuses(values: int, dtype: torch.dtype, ranks: int, rank: int, message: str) -> None:
    with FakeTensorMode():
        x = torch.zeros(values, dtype=dtype, device="cuda")
        calls = call_counts(CAPACITY, torch.device("cuda"))
        with pytest.raises(KernelError, match=message):
            push_all_reduce(x, calls, list(range(ranks)), CAPACITY, rank)


def test_fake() -> None:
    with FakeTensorMode():
        x = torch.zeros(2, 8, dtype=torch.bfloat16, device="cuda")
        out = push_all_reduce(x, call_counts(CAPACITY, torch.device("cuda")), [1, 2], CAPACITY, 1)
        assert (out.shape, out.dtype, out.device.type) == (x.shape, x.dtype, "cuda")
