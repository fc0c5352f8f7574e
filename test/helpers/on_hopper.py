"""What tests on a GPU share: that it is a Hopper, graphs that follow their inputs, control words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimi_k2.kernels.common import workspace

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NEEDS_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


def assert_graph_follows(
    call: Callable[[], tuple[Tensor, ...]], refresh: Callable[[], object], replays: int = 3
) -> None:
    """A graph of two calls, so that one begins while the one before it runs, gives what a call does of new inputs."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        results = call()
    for _ in range(replays):
        refresh()
        graph.replay()
        assert all(torch.equal(result, again) for result, again in zip(results, call(), strict=True))


def assert_words_are_clear() -> None:
    """Control words are as every launch must leave them, those of captures left out: the next replay clears them.

    Flags are not reset, and the third word of the header counts launches.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for (*_, capture), kept in workspace._kept.items():
        for value, words in kept.items():
            wrong = (words if value else words[: len(words) // 2]) != value
            wrong[2] &= value != 0
            assert capture or not wrong.any(), (value, wrong.nonzero().flatten().tolist()[:8])
