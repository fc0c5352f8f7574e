"""What the router chooses in float32, beside float64; and its bias on the device beside the file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import environment
import pytest
import torch
from safetensors.torch import load_file

from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder

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
    wanted = torch.zeros_like(scores).scatter(1, best.indices[:, :8], 1.0)
    same = ((affinities > 0) == (wanted > 0)).all(dim=1)
    decided = best.values[:, 7] - best.values[:, 8] > APART
    print(
        f"\nbias {spread}: {int((~same).sum())} of {TOKENS} tokens differ, {int((~decided).sum())} within {APART:.1e}"
    )
    assert bool(same[decided].all())
    assert int((~decided).sum()) < 0.03 * TOKENS
    weights = scores * wanted
    weights *= config.routed_scaling_factor / weights.sum(dim=1, keepdim=True)
    torch.testing.assert_close(affinities[same].double(), weights[same], rtol=0, atol=1e-6)
    assert torch.equal(chosen.sort(dim=1).values, affinities.nonzero()[:, 1].view(TOKENS, 8))


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (lambda bias: bias, False),
        (lambda bias: bias.to(torch.bfloat16), True),
        (lambda bias: bias.to(torch.bfloat16).float(), True),
        (lambda bias: torch.zeros_like(bias), True),
        (lambda bias: None, True),
    ],
    ids=["as it is", "bfloat16", "rounded", "zero", "dropped"],
)
def test_the_bias_on_the_device_is_the_files(
    checkpoints: dict[str, Path], tmp_path: Path, fault: Any, seen: bool
) -> None:
    Presharder(checkpoints["bf16"], tmp_path, Layout(1, experts="bf16")).run()
    weights = load_file(tmp_path / "weights" / "tp0_sharded_checkpoint.safetensors")
    moved = fault(weights[NAME])
    device = {"->".join(name.split(".")): tensor for name, tensor in weights.items() if name != NAME}
    device |= {} if moved is None else {NAME: moved}
    loaded = SimpleNamespace(nxd_model=SimpleNamespace(weights=[device], initialize=lambda *_: None))
    app = environment.contrib("modeling_kimi_k2").NeuronKimiK2ForCausalLM
    if not seen:
        app.initialize(loaded, [weights], 0)
        return
    with pytest.raises(ValueError, match=NAME):
        app.initialize(loaded, [weights], 0)
