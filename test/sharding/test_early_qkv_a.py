"""Early down projections' weights: their sum over the ranks against the checkpoint's own matrices in float64."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

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
from kimi_k2.quantization.stored import format_of
from kimi_k2.sharding import manifest
from kimi_k2.sharding.early_qkv_a import fold, scaled_projections
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import MANIFEST, check_made_for, made_layout, rank_file_name
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import verify
from kimi_k2.sharding.whole import load_whole_state_dict
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

TILED = {"bf16": "bf16_tiles", "fp8": "tiles"}
EXPERT = "mlp.expert_mlps.mlp_op.early_qkv_a.weight"
SHARED = "mlp.expert_mlps.shared_experts.early_qkv_a.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model for two ranks in BF16 and in FP8 blocks; 12 layers, so that names do not sort by number."""
    root = tmp_path_factory.mktemp("sources")
    config = tiny_config(num_hidden_layers=12, moe_intermediate_size=64, n_routed_experts=8)
    for fmt in TILED:
        write_synthetic_checkpoint(root / fmt, with_format(config, fmt), seed=2)
    return {fmt: root / fmt for fmt in TILED}


def layout_of(fmt: str, tp: int = 2, ep: int = 1) -> Layout:
    return Layout(tp, ep, experts=TILED[fmt], dtype=torch.float32)


def matrix(reader: CheckpointReader, config: KimiK2Config, module: str) -> Tensor:
    """A module's weight, float64."""
    names = [name for name in reader.names() if name.rpartition(".")[0] == module]
    stored = {name.rpartition(".")[2]: reader.get(name) for name in names}
    return format_of(config.quantization, module).dequantize(stored, torch.float32).double()


@pytest.mark.parametrize("fmt", TILED)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2)])
def test_ranks_sum_to_the_next_layers_down_projections(
    sources: dict[str, Path], tmp_path: Path, fmt: str, tp: int, ep: int
) -> None:
    """Of every layer with one behind it, dense or with experts: of the residual and what goes into each down_proj."""
    directory = sources[fmt]
    config = KimiK2Config.from_pretrained(directory)
    Presharder(directory, tmp_path, layout_of(fmt, tp, ep)).run()
    assert len(list(verify(tmp_path))) == tp * ep
    assert made_layout(tmp_path).kernels
    ranks = [load_file(tmp_path / "weights" / rank_file_name(rank)) for rank in range(tp * ep)]
    generator = torch.Generator().manual_seed(7)
    reader = CheckpointReader.for_config(directory, config)
    for layer in range(config.num_hidden_layers):
        root, here = f"model.layers.{layer}", f"layers.{layer}"
        held = [
            {name: one[name] for name in one if name.startswith(f"{here}.") and ".early_qkv_a." in name}
            for one in ranks
        ]
        if layer == config.num_hidden_layers - 1:
            assert not any(held)
            continue
        behind = f"model.layers.{layer + 1}"
        w_a = torch.cat(
            [matrix(reader, config, f"{behind}.self_attn.{name}") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        )
        gamma = reader.get(f"{behind}.input_layernorm.weight").double()

        def expected(x: Tensor, w_a: Tensor = w_a, gamma: Tensor = gamma) -> Tensor:
            return F.rms_norm(x, (config.hidden_size,), gamma, config.rms_norm_eps) @ w_a.T

        x = torch.randn(3, config.hidden_size, generator=generator, dtype=torch.float64)
        parts = x.chunk(tp * ep, dim=1)
        total = sum(
            part @ one[f"{here}.early_qkv_a.residual_weight"].double() for part, one in zip(parts, held, strict=True)
        )
        assert isinstance(total, Tensor)
        if config.is_moe_layer(layer):
            for expert in range(config.n_routed_experts):
                down = matrix(reader, config, f"{root}.mlp.experts.{expert}.down_proj")
                inner = torch.randn(3, down.shape[1], generator=generator, dtype=torch.float64)
                x = x + inner @ down.T
                group, number = divmod(expert, config.n_routed_experts // ep)
                for part, one in zip(inner.chunk(tp, dim=1), held[group * tp : (group + 1) * tp], strict=True):
                    total += part @ one[f"{here}.{EXPERT}"][number].double()
            names = [(f"{root}.mlp.shared_experts.down_proj", f"{here}.{SHARED}")]
        else:
            names = [(f"{root}.mlp.down_proj", f"{here}.early_qkv_a.values_weight")]
        for module, name in names:
            down = matrix(reader, config, module)
            inner = torch.randn(3, down.shape[1], generator=generator, dtype=torch.float64)
            x = x + inner @ down.T
            for part, one in zip(inner.chunk(tp * ep, dim=1), held, strict=True):
                total += part @ one[name].double().reshape(part.shape[1], -1)
        total *= torch.rsqrt(x.square().mean(dim=1, keepdim=True) + config.rms_norm_eps)
        wanted = expected(x)
        assert float((total - wanted).norm() / wanted.norm()) < 1e-6


def test_tensors_beside_the_experts_are_the_same(sources: dict[str, Path], tmp_path: Path) -> None:
    """With kernels and without: the experts and the router's weight lie otherwise, early sums are more."""
    for experts in ("bf16", "bf16_tiles"):
        Presharder(sources["bf16"], tmp_path / experts, Layout(2, experts=experts, dtype=torch.float32)).run()
    for rank in range(2):
        plain, tiled = (
            load_file(tmp_path / experts / "weights" / rank_file_name(rank)) for experts in ("bf16", "bf16_tiles")
        )
        of_experts = (".expert_mlps.", ".shared_experts.", ".linear_router.")
        more = {name for name in set(tiled) - set(plain) if not any(part in name for part in of_experts)}
        assert {name.split(".")[2] for name in more} == {"early_router", "early_qkv_a"}
        rest = [name for name in plain if not any(part in name for part in of_experts)]
        assert len(rest) > 12 * 8
        assert all(torch.equal(tiled[name].view(torch.uint8), plain[name].view(torch.uint8)) for name in rest)


@pytest.mark.parametrize("fmt", TILED)
def test_the_whole_state_dict_is_what_ranks_hold(sources: dict[str, Path], tmp_path: Path, fmt: str) -> None:
    config = KimiK2Config.from_pretrained(sources[fmt])
    layout = layout_of(fmt)
    Presharder(sources[fmt], tmp_path, layout).run()
    ranks = [load_file(tmp_path / "weights" / rank_file_name(rank)) for rank in range(2)]
    held = expert_formats()[TILED[fmt]].for_layout(config, layout)
    with CheckpointReader.for_config(sources[fmt], config) as reader:
        whole = load_whole_state_dict(reader, config, torch.float32, held)
    names = [name for name in ranks[0] if ".early_qkv_a." in name]
    assert len(names) == 2 + 3 * (config.num_hidden_layers - 2)
    for name in names:
        assert torch.equal(whole[name], torch.cat([one[name] for one in ranks], dim=int("expert_mlps" in name)))


def edited_options(directory: Path, **options: Any) -> None:
    """A manifest with other options, as an earlier version wrote them; None leaves one out."""
    path = directory / MANIFEST
    content = json.loads(path.read_text())
    given = {**content["made_from"]["options"], **options}
    content["made_from"]["options"] = {name: value for name, value in given.items() if value is not None}
    content["sha256"] = manifest._own_checksum(content)
    path.write_text(json.dumps(content))


BEFORE = {"decode": None, "early_router": True, "early_qkv_a": True, "shared_tiles": True}


def test_files_of_before_are_taken_or_refused_by_name(sources: dict[str, Path], tmp_path: Path) -> None:
    source, layout = sources["bf16"], layout_of("bf16")
    config = KimiK2Config.from_pretrained(source)
    Presharder(source, tmp_path, layout).run()
    with pytest.raises(ConfigError) as caught:
        check_made_for(tmp_path, config, Layout(2, experts="bf16", dtype=torch.float32))
    assert caught.value.field == "decode"
    edited_options(tmp_path, **BEFORE)
    check_made_for(tmp_path, config, layout)
    assert made_layout(tmp_path) == dataclasses.replace(layout, spmd_rank=None)
    Presharder(source, tmp_path, layout).run()  # nothing to do
    for field in ("early_router", "early_qkv_a", "shared_tiles"):
        edited_options(tmp_path, **{**BEFORE, field: None})
        for use in (partial(check_made_for, tmp_path, config, layout), Presharder(source, tmp_path, layout).run):
            with pytest.raises(ConfigError, match="convert again") as caught:
                use()
            assert caught.value.field == field
    edited_options(tmp_path, **BEFORE, attention_tiles="fp8")  # of experts in BF16, and of no group
    with pytest.raises(ConfigError) as caught:
        check_made_for(tmp_path, config, layout)
    assert caught.value.field == "attention_tiles"


def test_the_command_and_damage(sources: dict[str, Path], tmp_path: Path) -> None:
    options = ["--tp", "2", "--experts", "bf16_tiles", "--decode", "kernels"]
    done = CliRunner().invoke(app, ["convert", str(sources["bf16"]), str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    path, name = tmp_path / "weights" / rank_file_name(1), f"layers.3.{EXPERT}"
    weight = load_file(path)[name].view(torch.uint8).numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(weight) + 17] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        list(verify(tmp_path))
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        ({"target": "cuda", "experts": "stored", "decode": "kernels"}, "experts"),
        ({"experts": "blockwise", "decode": "kernels"}, "experts"),
        ({"experts": "tiles", "decode": "xla"}, "experts"),
        ({"experts": "tiles", "decode": "fast"}, "decode"),
        ({"experts": "tiles", "query_group": 2}, "query_group"),
        ({"experts": "tiles", "decode": "layers", "query_group": 3}, "query_group"),
    ],
)
def test_what_does_not_go_together(layout: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout(2, **layout)
    assert caught.value.field == field


def test_a_shared_expert_of_three_linears(tmp_path: Path) -> None:
    """Of a width that is in no tiles, stored in BF16."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 64, "n_shared_experts": 3, "n_routed_experts": 8}
    config = with_format(tiny_config(**sizes), "int4")
    write_synthetic_checkpoint(tmp_path / "source", config, seed=2)
    Presharder(tmp_path / "source", tmp_path / "out", Layout(2, experts="tiles")).run()
    assert len(list(verify(tmp_path / "out"))) == 2
    ranks = [load_file(tmp_path / "out" / "weights" / rank_file_name(rank)) for rank in range(2)]
    found = torch.cat([one["layers.1.early_qkv_a.values_weight"] for one in ranks]).double()
    with CheckpointReader.for_config(tmp_path / "source", config) as reader:
        names = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
        w_a = torch.cat([matrix(reader, config, f"model.layers.2.{name}") for name in names])
        gamma = reader.get("model.layers.2.input_layernorm.weight").double()
        wanted = (w_a * gamma) @ matrix(reader, config, "model.layers.1.mlp.shared_experts.down_proj")
    assert float((found - wanted.T).norm() / wanted.norm()) < 2e-3  # rounded to BF16


def test_down_projections_are_closer_to_exact_than_those_of_rounded_hidden_states() -> None:
    """At the real width, 64 ranks with 32 columns of two experts; BF16 weights, activations and residual."""
    tokens, hidden, columns, ranks, width, eps = 64, 7168, 2112, 64, 2 * 32, 1e-6
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    residual, inner = draw(tokens, hidden), draw(tokens, ranks * width)
    w_a, down = draw(columns, hidden, scale=hidden**-0.5), draw(hidden, ranks * width, scale=(ranks * width) ** -0.5)
    gamma = 1 + 0.1 * draw(hidden)
    x = residual.double() + inner.double() @ down.double().T
    wanted = F.rms_norm(x, (hidden,), gamma.double(), eps) @ w_a.double().T

    # Each rank's part of the experts' output and their sum are BF16, as are the residual stream and the norm's output.
    each = zip(inner.chunk(ranks, dim=1), down.chunk(ranks, dim=1), strict=True)
    parts = torch.stack([(value.float() @ weight.float().T).to(torch.bfloat16).float() for value, weight in each])
    stream = residual + parts.sum(dim=0).to(torch.bfloat16)
    normed = F.rms_norm(stream.float(), (hidden,), None, eps).to(torch.bfloat16) * gamma
    rounded = (normed.float() @ w_a.float().T).to(torch.bfloat16)

    names = {"q_a_proj": w_a[:1536], "kv_a_proj_with_mqa": w_a[1536:], "input_layernorm": gamma}
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905").model_copy(update={"quantization": None})
    scaled = scaled_projections(config, 1, lambda module: {"weight": names[module.rpartition(".")[2]]})
    of_inner = fold(scaled, down.float(), torch.bfloat16)
    of_residual = scaled.T.to(torch.bfloat16)
    # Summands of each rank in float32, and in BF16 as they would ride in a BF16 all-reduce.
    summands = torch.stack([
        h.float() @ a.float() + v.float() @ w.float()
        for h, a, v, w in zip(
            residual.chunk(ranks, dim=1), of_residual.chunk(ranks), inner.chunk(ranks, dim=1), of_inner.chunk(ranks),
            strict=True,
        )
    ])  # fmt: skip
    factor = torch.rsqrt(stream.float().square().mean(dim=1, keepdim=True) + eps)
    early = (summands.sum(dim=0) * factor).to(torch.bfloat16)
    in_bf16 = (summands.to(torch.bfloat16).float().sum(dim=0).to(torch.bfloat16) * factor).to(torch.bfloat16)

    far, near, third = (float((one - wanted).norm() / wanted.norm()) for one in (rounded, early, in_bf16))
    print(f"\nrelative L2 to float64: ordinary {far:.1e}, folded {near:.1e}, its summands in BF16 {third:.1e}")
    assert near < 0.75 * far
