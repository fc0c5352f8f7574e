"""The FP8 expert kernel against float64 over the dequantized weights. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from e4m3 import rounded

from kimi_k2.bench.kernels.expert_formats import random_fp8, random_routing
from kimi_k2.kernels.experts.fp8 import moe_fp8

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
H = 1024


def reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    scores: torch.Tensor,
    rounding: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    def dense(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return weight.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)

    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in indices.unique().tolist():
        if e < 0:
            continue
        token, slot = torch.where(indices == e)
        gate, up = (rounding(x[token]) @ dense(weights[0][e], weights[1][e]).T).chunk(2, -1)
        y = rounding(F.silu(gate) * up) @ dense(weights[2][e], weights[3][e]).T
        out.index_add_(0, token, y * scores[token, slot, None].double())
    return out


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    relative: float = ((a.double() - b).norm() / b.norm()).item()
    return relative


CASES = [
    (1, 8, None), (8, 8, [1, 16, 4, 1, 2]), (8, 8, [1, 16, 2, 2, 1]), (64, 8, None), (64, 8, [0, 32, 2, 2, 1]),
    (300, 8, [0, 32, 1, 1, 4]), (1000, 8, [0, 64, 1, 1, 2]), (1000, 8, [0, 128, 1, 1, 1]),
    (340, 8, [0, 128, 1, 1, 1]), (64, 1, None), (700, 1, None), (2700, 1, [0, 128, 1, 1, 2]),
    (1000, 8, [0, 128, 1, 2, 4]), (700, 1, [0, 128, 1, 2, 1]),
    (1000, 8, [0, 256, 1, 1, 1]), (340, 8, [0, 256, 1, 2, 4]), (64, 8, [0, 256, 1, 1, 1]),
    (2700, 1, [0, 256, 1, 1, 2]), (700, 1, [0, 256, 1, 2, 1]),
    (2100, 8, [0, 32, 1, 1, 2]),  # more outputs of pairs than the L2 keeps: summed slab after slab
]  # fmt: skip


@pytest.mark.parametrize("inter", [256, 512])
@pytest.mark.parametrize(("tokens", "top_k", "choice"), CASES)
def test_matches_float64(tokens: int, top_k: int, choice: list[int] | None, inter: int) -> None:
    torch.manual_seed(tokens + inter)
    weights = random_fp8(32, inter, H)
    indices, scores = random_routing(tokens, top_k, 32)
    if tokens > 2:
        indices[1, 0], scores[tokens - 1] = -1, 0.0  # an invalid pair, and a padded token
        indices[2 : tokens // 2, 0] = 5  # a crowded expert
    x = torch.randn(tokens, H, device="cuda").bfloat16()
    out = moe_fp8(x, *weights, indices, scores, choice=choice)
    exact = reference(x, weights, indices, scores, lambda v: v.double())
    same_rounding = reference(x, weights, indices, scores, rounded)
    cost = distance(same_rounding, exact)  # what rounding the activations to e4m3 costs by itself
    # The tensor cores keep about 14 bits of an e4m3 sum, which moves some intermediates over an e4m3 step.
    assert distance(out, same_rounding) < cost
    assert distance(out, exact) < 1.15 * cost
    if tokens > 2:
        assert not out[tokens - 1].any()
    for _ in range(3):
        assert torch.equal(out, moe_fp8(x, *weights, indices, scores, choice=choice)), "not deterministic"


def test_expert_parallel_ranks_sum_to_the_whole() -> None:
    weights = random_fp8(32, 256, H)
    indices, scores = random_routing(40, 8, 32)
    x = torch.randn(40, H, device="cuda").bfloat16()
    total = torch.zeros(40, H, device="cuda")
    for rank in range(2):
        mine = torch.full((32,), -1, dtype=torch.int32, device="cuda")
        mine[16 * rank : 16 * rank + 16] = torch.arange(16, device="cuda", dtype=torch.int32)
        part = tuple(w[16 * rank : 16 * rank + 16].contiguous() for w in weights)
        total += moe_fp8(x, *part, indices, scores, expert_map=mine).float()
    assert distance(total, moe_fp8(x, *weights, indices, scores).double()) < 5e-3


@pytest.mark.parametrize(("tokens", "choice"), [(4, None), (300, None), (2100, [0, 32, 1, 1, 2])])
def test_graph_replay_follows_its_inputs(tokens: int, choice: list[int] | None) -> None:
    """Also where other launches sort before and sum after: nothing of the routing before is left in any scratch."""
    weights = random_fp8(32, 256, H)
    x, (indices, scores) = torch.randn(tokens, H, device="cuda").bfloat16(), random_routing(tokens, 8, 32)
    moe_fp8(x, *weights, indices, scores, choice=choice)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_fp8(x, *weights, indices, scores, choice=choice)
    for _ in range(3):
        fresh = random_routing(tokens, 8, 32)
        indices.copy_(fresh[0])
        scores.copy_(fresh[1])
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, moe_fp8(x, *weights, indices, scores, choice=choice))
