"""The BF16 expert kernel against float64, fresh random inputs. Needs a GPU with Triton."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_hopper import distance, routed
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
    def expert(rows: Tensor, e: int) -> Tensor:
        gate, up = (rows @ gate_up[e].double().T).chunk(2, -1)
        return (F.silu(gate) * up) @ down[e].double().T

    return routed(x, indices, scores, expert)


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


def test_the_table_takes_it() -> None:
    gate_up, down = (Weight({"weight": one}) for one in weights(256))
    given = torch.randn(33, HIDDEN, device="cuda").bfloat16(), ExpertWeights(gate_up, down)
    registry.pin("")
    assert routed_experts.choose(*given, *random_routing(33, 8, EXPERTS)).name == "moe_bf16"
