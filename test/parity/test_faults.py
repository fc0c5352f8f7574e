"""Faults, put in from outside; the comparison must name the layer and the module where each one enters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from kimi_k2.model import moe
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.linear import RMSNorm
from kimi_k2.model.moe import Router
from kimi_k2.model.rope import RotaryEmbedding
from kimi_k2.ops import mla
from kimi_k2.ops.experts import noaux_tc_gate, routed_experts
from kimi_k2.parity.compare import Comparison, compare
from kimi_k2.parity.logits import random_tokens
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.parity.run import run_plain, run_transformers
from kimi_k2.parity.trace import Inputs, Trace
from kimi_k2.quantization.fp8_block import dequantize_fp8_block

LAYER = 2  # of the faults that sit in one layer
Patch = pytest.MonkeyPatch
Module = TypeVar("Module", bound=torch.nn.Module)


@pytest.fixture(scope="module")
def directory(fp8: Path) -> Path:
    return fp8


@pytest.fixture(scope="module")
def inputs(directory: Path) -> Inputs:
    return Inputs(random_tokens(512, 40, seed=0), random_tokens(512, 6, seed=1), kept_positions=40)


@pytest.fixture(scope="module")
def golden(directory: Path, inputs: Inputs) -> Trace:
    return run_plain(KimiK2ForCausalLM.from_pretrained(directory), inputs)


def of_layer(model: KimiK2ForCausalLM, name: str, kind: type[Module]) -> Module:
    """A module of the layer that has the fault."""
    found = model.get_submodule(f"model.layers.{LAYER}.{name}")
    assert isinstance(found, kind)
    return found


def bias_before_sigmoid(model: KimiK2ForCausalLM, patch: Patch) -> None:
    gate = of_layer(model, "mlp.gate", Router)
    bias, none = gate.e_score_correction_bias, torch.zeros_like(gate.e_score_correction_bias)
    patch.setattr(gate, "forward", lambda x: noaux_tc_gate(x @ gate.weight.T + bias, none, gate.top_k, **gate.options))


def no_routed_scaling_factor(model: KimiK2ForCausalLM, patch: Patch) -> None:
    forward = Router.forward

    def unscaled(self: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        indices, weights = forward(self, x)
        return indices, weights / self.options["routed_scaling_factor"]

    patch.setattr(Router, "forward", unscaled)


def yarn_factor_32(model: KimiK2ForCausalLM, patch: Patch) -> None:
    config = model.config
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 64
    other = config.model_copy(update={"rope_scaling": config.rope_scaling.model_copy(update={"factor": 32.0})})
    patch.setattr(model.model, "rotary", RotaryEmbedding(other))
    for layer in model.model.layers:
        patch.setattr(layer.self_attn, "config", other)


def epsilon_1e_5(model: KimiK2ForCausalLM, patch: Patch) -> None:
    norm = of_layer(model, "self_attn.q_a_layernorm", RMSNorm)
    assert norm.eps == 1e-6
    patch.setattr(norm, "eps", 1e-5)


def epsilon_of_a_layer(model: KimiK2ForCausalLM, patch: Patch) -> None:
    norm = of_layer(model, "input_layernorm", RMSNorm)
    patch.setattr(norm, "eps", 10 * norm.eps)


def epsilon_of_the_last_norm(model: KimiK2ForCausalLM, patch: Patch) -> None:
    patch.setattr(model.model.norm, "eps", 10 * model.model.norm.eps)


def clamp_at_240(model: KimiK2ForCausalLM, patch: Patch) -> None:
    """The published port's conversion: codes above 240 become 240 under an unchanged scale."""
    from kimi_k2.quantization import fp8_block

    def clamped(weight: Tensor, scale: Tensor, *rest: Any) -> Tensor:
        low = weight.to(torch.float32).clamp(-240, 240).to(torch.float8_e4m3fn)
        return dequantize_fp8_block(low, scale, *rest)

    patch.setattr(fp8_block, "dequantize_fp8_block", clamped)
    model.load_state_dict(KimiK2ForCausalLM.from_pretrained(PATH[0]).state_dict())


PATH: list[Path] = []


def swapped_gate_and_up(model: KimiK2ForCausalLM, patch: Patch) -> None:
    experts = of_layer(model, "mlp.experts", moe.Experts)
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    patch.setitem(experts._buffers, "gate_up_proj", torch.cat((up, gate), dim=1))


def dropped_token(model: KimiK2ForCausalLM, patch: Patch) -> None:
    routed, layer = routed_experts, of_layer(model, "mlp.experts", moe.Experts)

    def dropping(x: Tensor, experts: Any, indices: Tensor, weights: Tensor) -> Tensor:
        out = routed(x, experts, indices, weights)
        if experts.down.tensors["weight"] is layer.down_proj and len(x) > 1:
            out[17] = 0.0  # one of 40 tokens, at prefill only
        return out

    patch.setattr(moe, "routed_experts", dropping)


def wrong_scale_of_one_expert(model: KimiK2ForCausalLM, patch: Patch) -> None:
    of_layer(model, "mlp.experts", moe.Experts).down_proj[5] *= 1.5


def cache_off_by_one(model: KimiK2ForCausalLM, patch: Patch) -> None:
    update = LatentCache.update

    def late(self: LatentCache, layer: int, entries: Tensor, positions: Tensor, length: int) -> Tensor:
        if positions.shape[1] > 1 or layer != LAYER:
            return update(self, layer, entries, positions, length)
        self.data[layer, 0, int(positions[0, 0]) - 1] = entries[0, 0]
        return self.data[layer][:, :length]

    patch.setattr(LatentCache, "update", late)


def half_split_rope(model: KimiK2ForCausalLM, patch: Patch) -> None:
    def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    patch.setattr(mla, "apply_rotary_interleaved", half_split)


@dataclass(frozen=True)
class Expected:
    phase: str
    layer: int | None
    module: str


FAULTS: dict[Callable[[KimiK2ForCausalLM, Patch], None], Expected] = {
    bias_before_sigmoid: Expected("prefill", LAYER, "mlp.gate.selection"),
    no_routed_scaling_factor: Expected("prefill", 1, "mlp.gate.weights"),
    yarn_factor_32: Expected("prefill", None, "rope.cos_sin"),
    epsilon_1e_5: Expected("prefill", LAYER, "self_attn.q_a_layernorm.small"),
    epsilon_of_a_layer: Expected("prefill", LAYER, "input_layernorm.small"),
    epsilon_of_the_last_norm: Expected("prefill", None, "norm.small"),
    clamp_at_240: Expected("prefill", 0, "self_attn.q_a_proj"),
    swapped_gate_and_up: Expected("prefill", LAYER, "mlp.experts"),
    dropped_token: Expected("prefill", LAYER, "mlp.experts"),
    wrong_scale_of_one_expert: Expected("prefill", LAYER, "mlp.experts"),
    cache_off_by_one: Expected("decode", LAYER, "self_attn.kv_cache"),
    half_split_rope: Expected("prefill", 0, "self_attn.rope.k_pe"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_layer_and_module_of_a_fault(
    directory: Path, inputs: Inputs, golden: Trace, monkeypatch: Patch, fault: Callable[..., None]
) -> None:
    model = KimiK2ForCausalLM.from_pretrained(directory)
    PATH[:] = [directory]
    fault(model, monkeypatch)
    result = compare(run_plain(model, inputs), golden, model.config)
    assert not result.passed
    assert result.first is not None
    found = Expected(result.first.phase, result.first.layer, result.first.module)
    assert found == FAULTS[fault], result.first
    if fault is dropped_token:
        assert result.first.row == 17


@pytest.mark.parametrize("name", ["bf16", "fp8", "thinking"])
def test_transformers_passes_point_by_point(checkpoints: dict[str, Path], name: str) -> None:
    """An implementation that is not ours: every point but our cache's, in both phases."""
    model = KimiK2ForCausalLM.from_pretrained(checkpoints[name])
    own = Inputs(random_tokens(512, 24, seed=2), random_tokens(512, 4, seed=3))
    ours, theirs = run_plain(model, own), run_transformers(load_transformers_model(checkpoints[name]), own)
    result: Comparison = compare(ours, theirs, model.config)
    worst = max(result.points, key=lambda point: point.relative_l2)
    print(f"\n{name}: {len(result.points)} points, worst {worst.point} {worst.relative_l2:.1e}")
    assert result.passed, result.first
    missing = {key.split(".")[-1] for key in ours.values.keys() - theirs.values.keys()}
    assert missing == {"kv_cache", "k_pe"}
