"""The pushed sum: its kernel on the host between processes that share the mailboxes, its checks and its fake."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from kimi_k2.kernels.comm.push_all_reduce import call_counts, fill_arguments, mailbox_bytes

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
