"""What tests of kernels share: the GPU that they need, distances, float64 experts, graphs that follow their inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NEEDS_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 from float64 values."""
    return float((found.double() - wanted).norm() / wanted.norm())


def dense(weight: Tensor, scale: Tensor) -> Tensor:
    """A matrix of FP8 blocks in float64."""
    wide = scale.double().repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    return weight.double() * wide


def routed(
    x: Tensor, indices: Tensor, scores: Tensor, expert: Callable[[Tensor, int], Tensor],
    rounded: Callable[[Tensor], Tensor] = torch.Tensor.double,
) -> Tensor:  # fmt: skip
    """float64 sum of each token's experts, `rounded` each; `expert` is of some of x's rows and of an expert's index."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for chosen in indices[indices >= 0].unique().tolist():
        token, slot = torch.where(indices == chosen)
        out.index_add_(0, token, rounded(expert(x[token].double(), chosen) * scores[token, slot, None].double()))
    return out


def assert_graph_follows(
    call: Callable[[], tuple[Tensor, ...]], refresh: Callable[[], object], replays: int = 3
) -> None:
    """A graph of two calls, so that one begins while the one before it runs, gives what a call does of new inputs."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        made = call()
    for _ in range(replays):
        refresh()
        graph.replay()
        assert all(torch.equal(one, again) for one, again in zip(made, call(), strict=True))
