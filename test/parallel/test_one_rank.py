"""A conversion for one rank: no process group, logits of the checkpoint; INT4 whose down_proj is or becomes BF16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Experts, MoE
from kimi_k2.parallel.apply import load_rank, parallelize
from kimi_k2.serving.paged.weights import RankLoader
from kimi_k2.sharding.layout import Layout, engine_serves, served_experts
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

W2_BF16 = Layout(1, target="cuda", experts="w2_bf16")


@pytest.mark.parametrize("source", ["fp8", "thinking", "mixed"])
@torch.inference_mode()
def test_one_ranks_file_has_the_checkpoints_logits(source: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    if source == "mixed":
        checkpoints = {"mixed": tmp_path / "source"}
        config = W2_BF16.held(tiny_config("kimi-k2-thinking", moe_intermediate_size=128))
        write_synthetic_checkpoint(tmp_path / "source", config)
    layout = Layout(1, target="cuda", experts="stored")
    Presharder(checkpoints[source], tmp_path / "ranks", layout).run()
    plain = KimiK2ForCausalLM.from_pretrained(checkpoints[source])
    model = load_rank(tmp_path / "ranks", plain.config, layout, 0, dtype=torch.float32)
    held = {name for module in model.modules() if isinstance(module, Experts) for name in module._buffers}
    assert ("down_proj" in held and "gate_up_proj_packed" in held) == (source == "mixed")
    ids = torch.randint(0, plain.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(4))
    assert torch.equal(model(ids), plain(ids))


@torch.inference_mode()
def test_second_matrices_become_bf16(thinking: Path, tmp_path: Path) -> None:
    """Converted, and taken from the checkpoint one tensor after another as an engine gives them: rounded once."""
    plain = KimiK2ForCausalLM.from_pretrained(thinking)
    Presharder(thinking, tmp_path, W2_BF16).run()
    model = load_rank(tmp_path, plain.config, W2_BF16, 0, dtype=torch.float32)
    with torch.device("meta"):
        served = KimiK2ForCausalLM(W2_BF16.held(plain.config), dtype=torch.float32, keep_quantized=True)
    loader = RankLoader(parallelize(served, W2_BF16, 0), make_plan(plain.config, W2_BF16), 0)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(thinking.glob("*.safetensors")):
        tensors |= load_file(shard)
    loader.load(sorted(tensors.items(), key=lambda one: one[0][::-1]))  # a matrix's parts far from each other
    loader.check()
    for name, buffer in model.named_buffers():
        assert torch.equal(served.get_buffer(name), buffer), name
    for layer, held in zip(plain.model.layers, model.model.layers, strict=True):
        if isinstance(layer.mlp, MoE):
            assert isinstance(held.mlp, MoE)
            rounded = layer.mlp.experts.down_proj.bfloat16().float()
            assert not torch.equal(rounded, layer.mlp.experts.down_proj)
            assert torch.equal(held.mlp.experts.down_proj, rounded)
            layer.mlp.experts.down_proj = rounded
    ids = torch.randint(0, plain.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(4))
    assert torch.equal(model(ids), plain(ids)) and torch.equal(served.eval()(ids), model(ids))


def test_only_int4_in_groups_of_32_has_them(fp8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="w2_bf16: expected INT4 in groups of 32"):
        make_plan(KimiK2Config.from_pretrained(fp8), W2_BF16)
    assert served_experts() == "stored"
    monkeypatch.setenv("KIMI_K2_EXPERTS", "w2_bf16")
    with pytest.raises(ConfigError, match="w2_bf16, but the engine's own model is to serve: LoRA"):
        engine_serves("LoRA")
    monkeypatch.setenv("KIMI_K2_EXPERTS", "bf16")
    with pytest.raises(ConfigError, match="expected stored or w2_bf16, got 'bf16'"):
        served_experts()
