"""The FP8 expert kernel against float64 over the dequantized weights. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from e4m3 import rounded
from on_hopper import NEEDS_HOPPER, dense, distance, routed

from kimi_k2.bench.kernels.expert_formats import random_fp8, random_routing
from kimi_k2.kernels.experts.fp8 import moe_fp8

pytestmark = NEEDS_HOPPER
H = 1024


def reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    scores: torch.Tensor,
    rounding: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    def expert(rows: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = (rounding(rows) @ dense(weights[0][e], weights[1][e]).T).chunk(2, -1)
        return rounding(F.silu(gate) * up) @ dense(weights[2][e], weights[3][e]).T

    return routed(x, indices, scores, expert)


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
