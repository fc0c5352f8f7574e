"""Sums over GPUs at decode sizes, ours beside PyTorch's, under `torchrun --nproc-per-node N -m`.

Calls follow each other in a graph on every rank, so that a call's time is from all parts ready to all sums there.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.bench.kernels.harness import graph_median
from kimi_k2.parallel.apply import AllReduce
from kimi_k2.parallel.ranks import join_ranks, leave_ranks
from kimi_k2.terminal import say

HIDDEN = 7168
TOKENS = (1, 2, 4, 8, 16, 32)
CALLS = 20


class OneShot:
    """PyTorch's one-shot sum, for which each rank reads its peers' parts."""

    def __init__(self, count: int) -> None:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        self.buffer: Tensor = symmetric.empty(count, dtype=torch.bfloat16, device="cuda")
        symmetric.rendezvous(self.buffer, dist.group.WORLD)

    def __call__(self, x: Tensor) -> Tensor:
        """Sum of all ranks' x."""
        self.buffer.copy_(x.view(-1))
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        return torch.ops.symm_mem.one_shot_all_reduce(self.buffer, "sum", name).view(x.shape)


def main() -> None:
    """Rank 0 prints microseconds a call and how far each sum is from float64's."""
    rank, _ = join_ranks("cuda")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    pushed, nccl = AllReduce(None), AllReduce(None, push=False)
    if rank == 0:
        say(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, bfloat16 [tokens, {HIDDEN}]")
    for tokens in TOKENS:
        torch.manual_seed(rank)
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        exact = x.double()
        dist.all_reduce(exact)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "ours": pushed,
            "PyTorch one-shot": OneShot(x.numel()),
            "NCCL": nccl,
        }
        for name, reduce in ways.items():
            actual = reduce(x.clone())
            error = float((actual.double() - exact).norm() / exact.norm())
            # NCCL writes to what it is given: each call has its own.
            copies = [x.clone() for _ in range(CALLS)]
            time = graph_median([partial(reduce, copy) for copy in copies])
            if rank == 0:
                say(f"{tokens:3} tokens  {name:<18} {time:7.2f} us  relative L2 {error:.2e}")
    leave_ranks()


if __name__ == "__main__":
    main()
