"""Early down projections' weights: their sum over the ranks against the checkpoint's own matrices in float64."""

from __future__ import annotations

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
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import verify
from kimi_k2.sharding.whole import load_whole_state_dict
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

TILED = {"bf16": "bf16_tiles", "fp8": "tiles"}
# What the kernel of whole layers takes.
SIZES: dict[str, Any] = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 64,
}  # fmt: skip
EXPERT = "mlp.expert_mlps.mlp_op.early_qkv_a.weight"
SHARED = "mlp.expert_mlps.shared_experts.early_qkv_a.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model for two ranks in BF16 and in FP8 blocks; 12 layers, so that names do not sort by number."""
    root = tmp_path_factory.mktemp("sources")
    config = tiny_config(num_hidden_layers=12, n_routed_experts=8, **SIZES)
    for fmt in TILED:
        write_synthetic_checkpoint(root / fmt, with_format(config, fmt), seed=2)
    return {fmt: root / fmt for fmt in TILED}


def layout_of(fmt: str, tp: int = 2, ep: int = 1) -> Layout:
    return Layout(tp, ep, experts=TILED[fmt], dtype=torch.float32, decode="layers")


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
    """Of every layer with experts and one behind it: of the residual and what goes into each down_proj."""
    directory = sources[fmt]
    config = KimiK2Config.from_pretrained(directory)
    Presharder(directory, tmp_path, layout_of(fmt, tp, ep)).run()
    assert len(list(verify(tmp_path))) == tp * ep
    assert made_layout(tmp_path).layers
    ranks = [load_file(tmp_path / "weights" / rank_file_name(rank)) for rank in range(tp * ep)]
    generator = torch.Generator().manual_seed(7)
    reader = CheckpointReader.for_config(directory, config)
    for layer in range(config.num_hidden_layers):
        root, here = f"model.layers.{layer}", f"layers.{layer}"
        held = [
            {name: one[name] for name in one if name.startswith(f"{here}.") and ".early_qkv_a." in name}
            for one in ranks
        ]
        if layer == config.num_hidden_layers - 1 or not config.is_moe_layer(layer):
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
        for expert in range(config.n_routed_experts):
            down = matrix(reader, config, f"{root}.mlp.experts.{expert}.down_proj")
            inner = torch.randn(3, down.shape[1], generator=generator, dtype=torch.float64)
            x = x + inner @ down.T
            group, number = divmod(expert, config.n_routed_experts // ep)
            for part, one in zip(inner.chunk(tp, dim=1), held[group * tp : (group + 1) * tp], strict=True):
                total += part @ one[f"{here}.{EXPERT}"][number].double()
        down = matrix(reader, config, f"{root}.mlp.shared_experts.down_proj")
        inner = torch.randn(3, down.shape[1], generator=generator, dtype=torch.float64)
        x = x + inner @ down.T
        for part, one in zip(inner.chunk(tp * ep, dim=1), held, strict=True):
            total += part @ one[f"{here}.{SHARED}"].double().squeeze(0)
        total *= torch.rsqrt(x.square().mean(dim=1, keepdim=True) + config.rms_norm_eps)
        wanted = expected(x)
        assert float((total - wanted).norm() / wanted.norm()) < 1e-6


def test_tensors_beside_the_experts_are_the_same(sources: dict[str, Path], tmp_path: Path) -> None:
    """Without kernels, for the torch-native line, and for whole layers, which have more; experts lie otherwise."""
    for name, layout in {
        "plain": Layout(2, experts="bf16", dtype=torch.float32),
        "native": Layout(2, experts="bf16_tiles", dtype=torch.float32),
        "layers": layout_of("bf16"),
    }.items():
        Presharder(sources["bf16"], tmp_path / name, layout).run()
    of_experts, attention = (".expert_mlps.", ".shared_experts."), ("q_b_proj", "kv_b_proj", "o_proj")
    for rank in range(2):
        plain, native, layers = (
            load_file(tmp_path / name / "weights" / rank_file_name(rank)) for name in ("plain", "native", "layers")
        )
        rest = {name for name in plain if not any(part in name for part in of_experts)}
        assert rest == {name for name in native if not any(part in name for part in of_experts)}
        more = {name for name in set(layers) - set(plain) if not any(part in name for part in of_experts)}
        assert {name.split(".")[2] for name in more} == {"early_router", "early_qkv_a", "self_attn"}
        lost = rest - set(layers)
        assert lost == {f"layers.{layer}.self_attn.{name}.weight" for layer in range(1, 12) for name in attention}
        for name in rest:
            turned = native[name].T if ".linear_router." in name else native[name]
            for found in (turned, layers.get(name, turned)):
                assert torch.equal(found, plain[name]), name


@pytest.mark.parametrize("fmt", TILED)
def test_the_whole_state_dict_is_what_ranks_hold(sources: dict[str, Path], tmp_path: Path, fmt: str) -> None:
    config = KimiK2Config.from_pretrained(sources[fmt])
    layout = layout_of(fmt)
    Presharder(sources[fmt], tmp_path, layout).run()
    ranks = [load_file(tmp_path / "weights" / rank_file_name(rank)) for rank in range(2)]
    held = expert_formats()[TILED[fmt]].for_layout(config, layout)
    with CheckpointReader.for_config(sources[fmt], config) as reader:
        whole = load_whole_state_dict(reader, config, torch.float32, held, decode="layers", ranks=2)
    names = [name for name in ranks[0] if ".early_qkv_a." in name]
    assert len(names) == 3 * (config.num_hidden_layers - 2)
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


@pytest.mark.parametrize("before", [
    {"decode": "kernels"}, {"decode": None, "early_router": True}, {"decode": None, "attention_tiles": "fp8"},
])  # fmt: skip
def test_files_of_before_are_refused_by_name(sources: dict[str, Path], tmp_path: Path, before: dict[str, Any]) -> None:
    source, layout = sources["bf16"], layout_of("bf16")
    config = KimiK2Config.from_pretrained(source)
    Presharder(source, tmp_path, layout).run()
    with pytest.raises(ConfigError) as caught:
        check_made_for(tmp_path, config, Layout(2, experts="bf16", dtype=torch.float32))
    assert caught.value.field == "decode"
    edited_options(tmp_path, **before)
    uses = (
        partial(check_made_for, tmp_path, config, layout), Presharder(source, tmp_path, layout).run,
        partial(made_layout, tmp_path),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(ConfigError, match="convert again with a preset of decode layers") as caught:
            use()
        assert caught.value.field == list(before)[-1]


def test_the_command_and_damage(sources: dict[str, Path], tmp_path: Path) -> None:
    options = ["--tp", "2", "--experts", "bf16_tiles"]
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
        ({"target": "cuda", "experts": "stored", "decode": "layers"}, "experts"),
        ({"experts": "blockwise", "decode": "layers"}, "experts"),
        ({"experts": "tiles", "decode": "kernels"}, "decode"),
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


def test_a_shared_expert_of_three_linears_is_refused() -> None:
    """Of a width that is in no tiles; the torch-native line takes it as it is."""
    config = with_format(tiny_config(**SIZES, n_shared_experts=3, n_routed_experts=8), "int4")
    make_plan(config, Layout(2, experts="tiles"))
    with pytest.raises(ConfigError, match="shared expert in tiles") as caught:
        make_plan(config, Layout(2, experts="tiles", decode="layers"))
    assert caught.value.field == "decode"


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
