"""Work on a second stream beside the current one: its result's memory in a graph. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.ops.streams import beside

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = torch.device("cuda")
VALUES = 2**24


def forked(x: Tensor) -> Tensor:
    """2x from the second stream, long before it is read."""
    return beside(lambda: x * 2, lambda: torch.cuda._sleep(10**7), DEVICE)[0] + 0


def test_a_graph_keeps_no_memory_for_each_fork(forks: int = 16) -> None:
    given = torch.ones(VALUES, device="cuda")
    forked(given)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = given
        for _ in range(forks):
            x = forked(x)
    assert torch.cuda.memory_reserved() - before <= 6 * given.nbytes
    for value in (1.0, 3.0):
        given.fill_(value)
        graph.replay()
        assert x.min().item() == x.max().item() == value * 2**forks


def test_a_fork_that_fails_is_joined() -> None:
    """Else the capture could not end."""

    def fails() -> None:
        raise KernelError("too large")

    given = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(KernelError):
            beside(lambda: given * 2, fails, DEVICE)
        x = given + 1
    graph.replay()
    assert x.tolist() == [2.0] * 4
