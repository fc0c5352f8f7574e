"""The noaux_tc gate against transformers' DeepseekV3 router, ties included."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.model.moe import Router
from kimi_k2.ops.experts import noaux_tc_gate
from kimi_k2.synthetic.config import tiny_config

transformers = pytest.importorskip("transformers")
TOKENS = 10_000


def reference_router(experts: int, top_k: int, n_group: int, topk_group: int, bias: torch.Tensor) -> torch.nn.Module:
    """transformers' router with an identity weight, so that hidden states are the logits."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

    config = transformers.DeepseekV3Config(
        hidden_size=experts, n_routed_experts=experts, num_experts_per_tok=top_k, n_group=n_group,
        topk_group=topk_group, routed_scaling_factor=2.827, norm_topk_prob=True,
    )  # fmt: skip
    router: torch.nn.Module = hf.DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(experts)
    router.e_score_correction_bias = bias
    return router


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (8, 4)])
@pytest.mark.parametrize("top_k", [6, 8])
@pytest.mark.parametrize("experts", [256, 384])
@torch.inference_mode()
def test_10000_tokens_against_transformers(experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    generator = torch.Generator().manual_seed(experts + top_k)
    logits = torch.randn(TOKENS, experts, generator=generator) - 2
    bias = torch.randn(experts, generator=generator) * 0.05
    indices, weights = noaux_tc_gate(
        logits, bias, top_k, n_group=n_group, topk_group=topk_group, norm_topk_prob=True, routed_scaling_factor=2.827
    )
    out = reference_router(experts, top_k, n_group, topk_group, bias)(logits)
    # transformers 4.57 returns (indices, weights), 5.x (logits, weights, indices).
    theirs, theirs_weights = out if len(out) == 2 else out[:0:-1]
    order, theirs_order = indices.argsort(dim=-1), theirs.argsort(dim=-1)
    assert torch.equal(indices.gather(1, order), theirs.gather(1, theirs_order))
    assert (weights.gather(1, order) - theirs_weights.gather(1, theirs_order)).abs().max() <= 1e-6


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    """On a coarse grid, and in equal pairs, where torch.topk may break a tie either way."""
    logits = (torch.randn(1000, 384, generator=torch.Generator().manual_seed(1)) * 4).round() / 4
    logits[::2, 1::2] = logits[::2, ::2]
    expected = logits.sigmoid().sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(noaux_tc_gate(logits, torch.zeros(384), 8)[0].sort().values, expected.sort().values)


def test_underflowing_scores_stay_finite() -> None:
    _, weights = noaux_tc_gate(torch.full((1, 16), -1000.0), torch.zeros(16), 4)
    assert torch.isfinite(weights).all()


def test_routers_bias_stays_float32_in_a_bf16_model() -> None:
    router = Router(tiny_config(), dtype=torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.dtype == torch.float32
