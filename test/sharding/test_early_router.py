"""The early router's weights in converted files: against the checkpoint's own matrices in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.cli import app
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError
from kimi_k2.model.norm import RMSNorm
from kimi_k2.ops.router import noaux_tc_gate
from kimi_k2.quantization.fp8_block import dequantize_fp8_block
from kimi_k2.quantization.stored import format_holding
from kimi_k2.sharding.early_router import fold
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import check_made_for, made_layout, rank_file_name
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import verify
from kimi_k2.sharding.whole import load_whole_state_dict

LAYER = 1
ROOT = f"layers.{LAYER}.early_router"
NAMES = ("residual_weight", "heads_weight")


def stored_weights(source: Path, config: KimiK2Config) -> tuple[Tensor, Tensor, Tensor]:
    """W_gate, gamma, W_o of the layer, float64."""
    root = f"model.layers.{LAYER}"
    with CheckpointReader.for_config(source, config) as reader:
        gate, gamma = reader.get(f"{root}.mlp.gate.weight"), reader.get(f"{root}.post_attention_layernorm.weight")
        o_proj = reader.get(f"{root}.self_attn.o_proj.weight")
        if o_proj.dtype.itemsize == 1:
            scale = reader.get(f"{root}.self_attn.o_proj.weight_scale_inv")
            o_proj = dequantize_fp8_block(o_proj, scale, dtype=torch.float32)
        return gate.double(), gamma.double(), o_proj.double()


@pytest.mark.parametrize("source", ["fp8", "bf16", "thinking"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 1), (2, 2)])
def test_ranks_sum_to_the_routers_logits(
    checkpoints: dict[str, Path], tmp_path: Path, source: str, tp: int, ep: int
) -> None:
    directory = checkpoints[source]
    config = KimiK2Config.from_pretrained(directory)
    layout = Layout(tp, ep, experts="bf16", early_router=True)
    Presharder(directory, tmp_path, layout).run()
    assert len(list(verify(tmp_path))) == tp * ep
    assert made_layout(tmp_path).early_router
    gate, gamma, o_proj = stored_weights(directory, config)
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(5, config.hidden_size, generator=generator, dtype=torch.float64)
    heads = torch.randn(5, config.num_attention_heads * config.v_head_dim, generator=generator, dtype=torch.float64)
    logits = torch.zeros(5, config.n_routed_experts, dtype=torch.float64)
    for rank in range(tp * ep):
        held = load_file(tmp_path / "weights" / rank_file_name(rank))
        for values, name in zip((hidden, heads), NAMES, strict=True):
            weight = held[f"{ROOT}.{name}"]
            assert weight.dtype == torch.float32
            logits += values.chunk(tp * ep, dim=1)[rank] @ weight.double()
    x = hidden + heads @ o_proj.T
    logits *= torch.rsqrt(x.square().mean(dim=1, keepdim=True) + config.rms_norm_eps)
    expected = F.rms_norm(x, (config.hidden_size,), gamma, config.rms_norm_eps) @ gate.T
    assert float((logits - expected).norm() / expected.norm()) < 1e-6


def test_all_other_tensors_are_the_same(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = checkpoints["fp8"]
    for early in (False, True):
        Presharder(source, tmp_path / str(early), Layout(2, experts="blockwise", early_router=early)).run()
    for rank in range(2):
        plain, early = (load_file(tmp_path / name / "weights" / rank_file_name(rank)) for name in ("False", "True"))
        moe = range(1, KimiK2Config.from_pretrained(source).num_hidden_layers)
        assert set(early) - set(plain) == {f"layers.{layer}.early_router.{name}" for layer in moe for name in NAMES}
        assert all(torch.equal(early[name].view(torch.uint8), value.view(torch.uint8)) for name, value in plain.items())


def test_the_whole_state_dict_is_what_ranks_hold(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = checkpoints["fp8"]
    config = KimiK2Config.from_pretrained(source)
    Presharder(source, tmp_path, Layout(4, experts="bf16", early_router=True)).run()
    ranks = [load_file(tmp_path / "weights" / rank_file_name(rank)) for rank in range(4)]
    plain = expert_formats()["bf16"].for_layout(config, Layout(1, experts="bf16"))
    with CheckpointReader.for_config(source, config) as reader:
        whole = load_whole_state_dict(reader, config, torch.bfloat16, plain, early_router=True)
    for name in NAMES:
        assert torch.equal(whole[f"{ROOT}.{name}"], torch.cat([held[f"{ROOT}.{name}"] for held in ranks]))


def test_files_with_and_without_are_not_taken_for_each_other(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = checkpoints["bf16"]
    config = KimiK2Config.from_pretrained(source)
    layouts = {early: Layout(2, experts="bf16", early_router=early) for early in (False, True)}
    for early, layout in layouts.items():
        Presharder(source, tmp_path / str(early), layout).run()
        check_made_for(tmp_path / str(early), config, layout)
        with pytest.raises(ConfigError) as caught:
            check_made_for(tmp_path / str(early), config, layouts[not early])
        assert caught.value.field == "early_router"
        with pytest.raises(ConfigError, match="other options"):
            Presharder(source, tmp_path / str(early), layouts[not early]).run()


def test_the_command_and_damage(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    options = ["--tp", "2", "--experts", "bf16", "--early-router"]
    done = CliRunner().invoke(app, ["convert", str(checkpoints["bf16"]), str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    path = tmp_path / "weights" / rank_file_name(1)
    weight = load_file(path)[f"{ROOT}.heads_weight"].numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(weight) + 17] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        list(verify(tmp_path))
    assert caught.value.tensor == f"{ROOT}.heads_weight"


def test_a_gpu_has_none() -> None:
    with pytest.raises(ConfigError) as caught:
        Layout(2, target="cuda", experts="stored", early_router=True)
    assert caught.value.field == "early_router"


def test_choices_are_closer_to_exact_than_those_by_rounded_hidden_states() -> None:
    """At the real width, BF16 activations: experts chosen by folded weights, and as the ordinary BF16 graph does."""
    tokens, hidden, count, ranks, width, eps = 512, 7168, 384, 8, 128, 1e-6
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    residual, values = draw(tokens, hidden), draw(tokens, ranks * width)
    gate, o_proj = draw(count, hidden, scale=hidden**-0.5), draw(hidden, ranks * width, scale=(ranks * width) ** -0.5)
    gamma, bias = 1 + 0.1 * draw(hidden), torch.randn(count, generator=generator) * 0.1

    def error(logits: Tensor, wanted: Tensor) -> tuple[float, int]:
        sets = [noaux_tc_gate(one, bias.to(one.dtype), 8)[0].sort(dim=1).values for one in (logits, wanted)]
        return float((logits - wanted).norm() / wanted.norm()), int((sets[0] != sets[1]).any(dim=1).sum())

    x = residual.double() + values.double() @ o_proj.double().T
    wanted = F.rms_norm(x, (hidden,), gamma.double(), eps) @ gate.double().T

    # Each rank's part of o_proj and their sum are BF16, as are the residual stream and what the norm gives.
    parts = zip(values.chunk(ranks, dim=1), o_proj.chunk(ranks, dim=1), strict=True)
    rounded_parts = [(value.float() @ weight.float().T).to(torch.bfloat16).float() for value, weight in parts]
    summed = torch.stack(rounded_parts).sum(dim=0)
    stream = residual + summed.to(torch.bfloat16)
    norm = RMSNorm(hidden, eps).to(torch.bfloat16)
    norm.weight.data = gamma
    rounded = norm(stream).float() @ gate.float().T

    stored = {"weight": o_proj}
    of_residual, of_heads = fold(gate, gamma, stored, format_holding(None, stored))
    early = residual.float() @ of_residual + values.float() @ of_heads
    early = early * torch.rsqrt(stream.float().square().mean(dim=1, keepdim=True) + eps)

    (far, changed), (near, kept) = (error(logits, wanted) for logits in (rounded, early))
    print(f"\nrelative L2 {far:.1e}, {changed} of {tokens} tokens with other experts; folded {near:.1e}, {kept}")
    assert near < far / 10
    assert kept < changed
