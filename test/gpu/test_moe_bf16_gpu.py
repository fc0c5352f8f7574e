"""The BF16 expert kernel against float64, fresh random inputs. Needs a GPU with Triton."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.bench.kernels.expert_formats import random_routing
from kimi_k2.kernels.experts.bf16 import moe_bf16
from kimi_k2.ops import registry
from kimi_k2.ops.experts import ExpertWeights, routed_experts
from kimi_k2.ops.linear import Weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
EXPERTS, HIDDEN = 32, 1024


def weights(inter: int) -> tuple[Tensor, Tensor]:
    first = torch.randn(EXPERTS, 2 * inter, HIDDEN, device="cuda") * 0.03
    return first.bfloat16(), (torch.randn(EXPERTS, HIDDEN, inter, device="cuda") * 0.03).bfloat16()


def reference(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in indices[indices >= 0].unique().tolist():
        token, slot = torch.where(indices == e)
        gate, up = (x[token].double() @ gate_up[e].double().T).chunk(2, -1)
        out.index_add_(0, token, (F.silu(gate) * up) @ down[e].double().T * scores[token, slot, None].double())
    return out


def distance(a: Tensor, b: Tensor) -> float:
    relative: float = ((a.double() - b).norm() / b.norm()).item()
    return relative


@pytest.mark.parametrize("inter", [128, 512])
@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 2000])
def test_matches_float64(tokens: int, inter: int) -> None:
    held, x = weights(inter), torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    indices, scores = random_routing(tokens, 8, EXPERTS)
    if tokens > 2:
        indices[1, 0], indices[2:, 1] = -1, 5
        indices[0] = -1
    out = moe_bf16(x, *held, indices, scores)
    wanted = reference(x, *held, indices, scores)
    assert distance(out, wanted) < 5e-3
    assert distance(out[-1], wanted[-1]) < 1e-2
    if tokens > 2:
        assert not out[0].any()
    assert torch.equal(out, moe_bf16(x, *held, indices, scores)), "not deterministic"


@pytest.mark.parametrize(("tokens", "top_k"), [(12, 1), (32, 1), (64, 2), (300, 1), (300, 2), (1500, 1), (5000, 1)])
def test_crowded_experts(tokens: int, top_k: int) -> None:
    """Those with far more pairs than an even routing gives have tiles of their own."""
    held, x = weights(256), torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    for crowded in (tokens // 3, tokens):
        indices, scores = random_routing(tokens, top_k, EXPERTS)
        indices[:crowded] = indices[0]
        out = moe_bf16(x, *held, indices, scores)
        assert distance(out, reference(x, *held, indices, scores)) < 5e-3
        assert torch.equal(out, moe_bf16(x, *held, indices, scores)), "not deterministic"


def test_expert_parallel_ranks_sum_to_the_whole() -> None:
    held, x = weights(256), torch.randn(40, HIDDEN, device="cuda").bfloat16()
    indices, scores = random_routing(40, 8, EXPERTS)
    total = torch.zeros(40, HIDDEN, device="cuda")
    for rank in range(2):
        mine = torch.full((EXPERTS,), -1, dtype=torch.int32, device="cuda")
        mine[16 * rank : 16 * rank + 16] = torch.arange(16, device="cuda", dtype=torch.int32)
        part = [w[16 * rank : 16 * rank + 16].contiguous() for w in held]
        total += moe_bf16(x, *part, indices, scores, mine).float()
    assert distance(total, reference(x, *held, indices, scores)) < 5e-3


def test_graph_replay_follows_its_inputs() -> None:
    """Through the table, which takes it for unquantized experts."""
    gate_up, down = weights(256)
    experts = ExpertWeights(Weight({"weight": gate_up}), Weight({"weight": down}))
    x, (indices, scores) = torch.randn(33, HIDDEN, device="cuda").bfloat16(), random_routing(33, 8, EXPERTS)
    registry.pin("")
    assert routed_experts.choose(x, experts, indices, scores).name == "moe_bf16"
    routed_experts(x, experts, indices, scores)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = routed_experts(x, experts, indices, scores)
    for _ in range(3):
        fresh = random_routing(33, 8, EXPERTS)
        indices.copy_(fresh[0])
        scores.copy_(fresh[1])
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert distance(out, reference(x, gate_up, down, indices, scores)) < 5e-3
