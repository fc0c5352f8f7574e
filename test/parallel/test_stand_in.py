"""The synthetic rank of the benchmark, small and on a CPU: every tensor filled, logits finite, of the rank's share."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.bench.kernels.model import launches, make_step, synthetic_rank
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Experts
from kimi_k2.ops.linear import dequantize
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.plan import make_plan
from kimi_k2.synthetic.config import tiny_config


@pytest.mark.parametrize("preset", ["kimi-k2-instruct-0905", "kimi-k2-thinking"])
@torch.inference_mode()
def test_a_rank_of_two_stands_alone(preset: str) -> None:
    config = tiny_config(
        preset, moe_intermediate_size=256, intermediate_size=512, num_attention_heads=8,
        num_key_value_heads=8, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
    )  # fmt: skip
    layout = Layout(2, target="cuda", experts="stored")
    model = synthetic_rank(config, layout, 1, communicate=False, device="cpu")
    state = model.state_dict()
    planned = {tensor.name: tensor.local_shape for tensor in make_plan(config, layout).tensors}
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == planned
    step = DecodeStep(model, new_cache(model, 1, 4))
    logits = step(torch.tensor([5]), torch.tensor([3]))
    assert logits.shape == (1, config.vocab_size // 2)
    assert bool(logits.isfinite().all())
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    spread = dequantize(experts.stored().gate_up.expert(0), torch.float32).std()
    assert 0.01 < spread < 0.04
    lines = launches(make_step(model, [4], communicate=False), 1, on_gpu=False)
    assert any("mm" in line for line in lines)


def test_a_rank_of_experts_maps_the_models_numbers_to_its_own() -> None:
    """What the kernels take for routing is the interval of which the plain function computes the experts."""
    config = tiny_config("kimi-k2-instruct-0905")
    count = config.n_routed_experts
    for rank in range(2):
        model = synthetic_rank(
            config, Layout(1, 2, target="cuda", experts="bf16"), rank, communicate=False, device="cpu"
        )
        experts = next(module for module in model.modules() if isinstance(module, Experts))
        found = experts.expert_map()
        assert found is not None
        local = torch.arange(count) - experts.first_expert
        assert torch.equal(found.long(), torch.where((local >= 0) & (local < experts.num_experts), local, -1))
        assert int((found >= 0).sum()) == count // 2 == experts.num_experts
    whole = next(module for module in KimiK2ForCausalLM(config).modules() if isinstance(module, Experts))
    assert whole.expert_map() is None
