"""Routings that `profile --routing` prescribes: what is drawn, and that a step follows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_k2.bench.kernels.routing import DrawnLayerStep, Routing, drawn_layers
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.layer_step import alone
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import KimiK2ForCausalLM


@pytest.mark.parametrize("text", ["uniform", "zipf:1.0", "zipf:1.5", "same"])
def test_draws_are_distinct_and_weights_sum_to_the_models(text: str) -> None:
    indices, weights = Routing.parse(text).draw(200, 8, 384, torch.Generator().manual_seed(1))
    assert all(len(set(row)) == 8 for row in indices.tolist())
    assert 0 <= int(indices.min()) <= int(indices.max()) < 384
    assert bool((weights > 0).all())
    torch.testing.assert_close(weights.sum(-1), torch.full((200,), 2.827))


def test_distinct_experts_of_a_batch() -> None:
    """64 tokens: 384 * (1 - (1 - 8 / 384)^64) = 284.2 of 384 if uniform, with a deviation of about 6."""
    drawn = {
        text: Routing.parse(text).draw(64, 8, 384, torch.Generator().manual_seed(2))[0].unique().numel()
        for text in ("uniform", "zipf:1.0", "same")
    }
    assert abs(drawn["uniform"] - 284.2) < 25
    assert drawn["zipf:1.0"] < 0.8 * drawn["uniform"]
    assert drawn["same"] == 8


def test_shares_follow_the_exponent() -> None:
    """One expert a token: its shares are p ~ rank^-s, by falling frequency."""
    indices, _ = Routing(1.0).draw(200_000, 1, 16, torch.Generator().manual_seed(3))
    shares = indices.flatten().bincount(minlength=16).sort(descending=True).values / 200_000
    wanted = 1 / torch.arange(1, 17)
    torch.testing.assert_close(shares, wanted / wanted.sum(), rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("text", ["", "zipf", "zipf:", "zipf:x", "zipf:-1", "zipf:nan", "even"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="routing"):
        Routing.parse(text)


@torch.inference_mode()
def test_a_step_takes_the_drawn_experts(wide: Path) -> None:
    model = KimiK2ForCausalLM.from_pretrained(wide, keep_quantized=True)
    now = torch.zeros(2, dtype=torch.int64)
    step = DecodeStep(model, new_cache(model, 2, 4), layers=drawn_layers(model, alone, Routing.parse("same")))
    layer = next(layer for layer in step.layers if layer.moe is not None)
    assert isinstance(layer, DrawnLayerStep)
    x = torch.randn(2, model.config.hidden_size)
    assert layer.distinct(x) == model.config.num_experts_per_tok
    assert layer.moe is not None
    layer.moe.experts.first_expert = model.config.n_routed_experts  # another rank's
    assert layer.distinct(x) == 0
    layer.moe.experts.first_expert = 0
    indices, weights = layer.drawn(x)
    assert torch.equal(
        layer.feed_forward(x), DecodeStep(model, new_cache(model, 2, 4)).layers[-1].feed_forward(x, (indices, weights))
    )
    assert bool(step(now, now).isfinite().all())
