"""What the router chooses in float32, beside float64; and its bias on the device beside what was loaded."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import environment
import pytest
import torch

from kimi_k2.config import KimiK2Config

TOKENS = 20_000
# Scores are below 1 and choices below 2: sigmoid to two units in the last place and the sum's rounding are at most
# 1.5 * 2^-23 off, so that two experts further apart than this are in the same order in float32 and in float64.
APART = 2.0**-21
NAME = "layers.1.mlp.router.e_score_correction_bias"


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.1])
def test_float32_chooses_what_float64_chooses(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    from neuronx_distributed.modules.moe import routing

    from kimi_k2.contrib_model import moe

    monkeypatch.setattr(routing, "get_expert_model_parallel_size", lambda: 1)
    monkeypatch.setattr(routing, "get_tensor_model_parallel_group", object)
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905", hidden_size=8)
    neuron_config = SimpleNamespace(torch_dtype=torch.float32)
    router = moe.KimiK2Router(SimpleNamespace(**config.model_dump(), neuron_config=neuron_config))
    draw = torch.Generator().manual_seed(1)
    bias = torch.randn(384, generator=draw) * spread
    router.e_score_correction_bias.data = bias
    logits = torch.randn(TOKENS, 384, generator=draw) - 2
    # Of every tenth token the ninth choice comes close to the eighth, before or behind it.
    best = (logits[::10].double().sigmoid() + bias.double()).topk(9)
    near = torch.randn(TOKENS // 10, generator=draw, dtype=torch.float64) * 4 * APART
    score = best.values[:, 7] - near - bias.double()[best.indices[:, 8]]
    logits[::10] = logits[::10].scatter(1, best.indices[:, 8:], score.logit(1e-6).float()[:, None])
    monkeypatch.setattr(moe, "dot_float32", lambda *_: logits)
    _, affinities, chosen = router(torch.zeros(TOKENS, 1, 8))
    assert affinities.dtype == torch.float32
    scores = logits.double().sigmoid()
    best = (scores + bias.double()).topk(9)
    wanted, (numbers, order) = best.indices[:, :8].sort(dim=1).values, chosen.sort(dim=1)
    same = (numbers == wanted).all(dim=1)
    decided = best.values[:, 7] - best.values[:, 8] > APART
    print(
        f"\nbias {spread}: {int((~same).sum())} of {TOKENS} tokens differ, {int((~decided).sum())} within {APART:.1e}"
    )
    assert bool(same[decided].all())
    assert int((~decided).sum()) < 0.03 * TOKENS
    weights = scores.gather(1, wanted)
    weights *= config.routed_scaling_factor / weights.sum(dim=1, keepdim=True)
    torch.testing.assert_close(affinities.gather(1, order)[same].double(), weights[same], rtol=0, atol=1e-6)


@pytest.mark.parametrize("fault", [None, torch.Tensor.bfloat16, torch.round, torch.zeros_like, "dropped"])
def test_the_bias_on_the_device_is_what_was_loaded(fault: Any) -> None:
    """As it is, in another dtype, of other values, none at all."""
    bias = torch.rand(16)
    device = {} if fault == "dropped" else {NAME.replace(".", "->"): fault(bias) if fault else bias}
    loaded = SimpleNamespace(nxd_model=SimpleNamespace(weights=[{"norm": bias, **device}], initialize=lambda *_: None))
    app = environment.contrib("modeling_kimi_k2").NeuronKimiK2ForCausalLM
    with pytest.raises(ValueError, match=NAME) if fault else nullcontext():
        app.initialize(loaded, [{NAME: bias}], 0)
