"""A stored format, a Neuron expert format, a GPU's expert kernel, a member: one file each, no change elsewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from kimi_k2 import config as config_module
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import MissingShardError, NonfiniteError, OrphanScaleError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import MoE
from kimi_k2.ops import registry
from kimi_k2.ops.experts import routed_experts
from kimi_k2.parallel.apply import load_rank
from kimi_k2.quantization.stored import Stored
from kimi_k2.sharding.experts.format import ExpertFormat, Matrix, register
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import rank_file_name
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the toy format; the only thing that knows of it is its file."""
    spec = importlib.util.spec_from_file_location("toy_format", Path(__file__).with_name("toy_format.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["toy_format"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["toy_format"])
    directory = tmp_path_factory.mktemp("toy")
    write_synthetic_checkpoint(directory, with_format(tiny_config(), "toy-int8"), seed=7)
    return directory


def test_checkpoint_and_config_are_read_back(toy: Path) -> None:
    config = KimiK2Config.from_pretrained(toy)
    assert config.quantization is not None
    assert config.quantization.name == "toy-int8"
    reader = CheckpointReader.for_config(toy, config)
    assert reader.tensors[f"{EXPERT}.weight"].dtype == torch.int8
    stored = {suffix: reader.get(f"{EXPERT}.{suffix}") for suffix in config.quantization.suffixes}
    weight = config.quantization.dequantize(stored, torch.float32)
    assert weight.std() == pytest.approx(config.hidden_size**-0.5, rel=0.05)


def test_the_model_runs_and_holds_it_as_stored(toy: Path) -> None:
    ids = torch.arange(9)[None]
    plain, kept = (KimiK2ForCausalLM.from_pretrained(toy, keep_quantized=keep) for keep in (False, True))
    assert kept.get_submodule("model.layers.1.mlp.shared_experts.up_proj").weight.dtype == torch.int8
    torch.testing.assert_close(plain(ids), kept(ids), rtol=1e-4, atol=1e-4)


def test_generate_and_inspect_commands(toy: Path) -> None:
    from kimi_k2.cli.app import app

    done = CliRunner().invoke(app, ["generate", str(toy), "--prompt", "Hello", "--max-new-tokens", "3"])
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, ["inspect", str(toy)]).exit_code == 0


@pytest.mark.parametrize("experts", ["bf16", "blockwise", "per_channel"])
def test_conversion_for_neuron(toy: Path, tmp_path: Path, experts: str) -> None:
    config = KimiK2Config.from_pretrained(toy)
    manifest = Presharder(toy, tmp_path, Layout(1, 2, experts=experts)).run()
    assert manifest["errors"]["total"]["relative_l2"] < 0.05
    held = load_file(tmp_path / "weights" / rank_file_name(0))
    root = "layers.1.mlp.experts.gate_up_proj"
    up = held[f"{root}.weight"].to(torch.float32)[3, :, config.moe_intermediate_size :].T
    if f"{root}.scale" in held:
        scale = held[f"{root}.scale"][3, :, held[f"{root}.scale"].shape[-1] // 2 :].T
        for dim in (0, 1):
            scale = scale.repeat_interleave(up.shape[dim] // scale.shape[dim], dim)
        up = up * scale
    reader = CheckpointReader.for_config(toy, config)
    assert config.quantization is not None
    stored = {suffix: reader.get(f"{EXPERT}.{suffix}") for suffix in config.quantization.suffixes}
    plain = config.quantization.dequantize(stored, torch.float32)
    assert float((up - plain).norm() / plain.norm()) < 0.04


def test_conversion_for_gpus_keeps_it(toy: Path, tmp_path: Path) -> None:
    config = KimiK2Config.from_pretrained(toy)
    layout = Layout(1, 1, "cuda", "stored")
    Presharder(toy, tmp_path / "one", layout).run()
    rank = load_rank(tmp_path / "one", config, layout, 0, dtype=torch.float32)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(
        rank(ids), KimiK2ForCausalLM.from_pretrained(toy, keep_quantized=True)(ids), rtol=1e-2, atol=1e-2
    )
    Presharder(toy, tmp_path / "two", Layout(2, 1, "cuda", "stored")).run()
    whole = load_file(tmp_path / "one" / "weights" / rank_file_name(0))
    halves = [load_file(tmp_path / "two" / "weights" / rank_file_name(number)) for number in (0, 1)]
    root = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(torch.cat([half[root] for half in halves], dim=2), whole[root])
    for half in halves:  # a row's scale belongs to both halves of the row
        assert torch.equal(half[f"{root}_row_scale"], whole[f"{root}_row_scale"])


def test_damage_is_named(toy: Path, tmp_path: Path) -> None:
    config = KimiK2Config.from_pretrained(toy)
    tensors = {k: v for shard in toy.glob("*.safetensors") for k, v in load_file(shard).items()}
    (tmp_path / "config.json").write_text((toy / "config.json").read_text())
    with pytest.raises(MissingShardError):
        CheckpointReader.for_config(tmp_path, config)
    scale = tensors.pop(f"{EXPERT}.weight_row_scale")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(OrphanScaleError, match=re.escape(f"{EXPERT}.weight_row_scale")):
        CheckpointReader.for_config(tmp_path, config)
    for bad, says in ((-scale, "negative"), (scale * 0, "are 0"), (scale * torch.nan, "NaN")):
        save_file({**tensors, f"{EXPERT}.weight_row_scale": bad}, tmp_path / "model.safetensors")
        with pytest.raises(NonfiniteError, match=says) as caught:
            KimiK2ForCausalLM.from_pretrained(tmp_path)
        assert caught.value.tensor == f"{EXPERT}.weight_row_scale"


@register
@dataclass(frozen=True)
class HalvedExperts(ExpertFormat):
    """A Neuron expert format in one class: half of each weight, and a scale of 2 an input column."""

    name = "toy-halved"
    quantization_type = "toy_halved"

    @classmethod
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> HalvedExperts:
        return cls()

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        return {"weight": (dtype, (rows, columns)), "scale": (torch.float32, (rows, 1))}

    def convert(self, matrix: Matrix, dtype: torch.dtype, error: Any) -> Stored:
        weight = matrix.dequantized(dtype) / 2
        return {"weight": weight, "scale": torch.full((matrix.rows, 1), 2.0)}


def test_a_neuron_expert_format_is_one_class(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from kimi_k2.cli.app import app

    for experts in ("toy-halved", "bf16"):
        command = ["convert", str(checkpoints["fp8"]), str(tmp_path / experts), "--tp", "2", "--experts", experts]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    halved, plain = (load_file(tmp_path / name / "weights" / rank_file_name(1)) for name in ("toy-halved", "bf16"))
    root = "layers.2.mlp.experts"
    for name in (f"{root}.gate_up_proj", f"{root}.down_proj"):
        product = halved[f"{name}.weight"] * halved[f"{name}.scale"].to(torch.bfloat16)
        assert torch.equal(product, plain[f"{name}.weight"])
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "toy-halved")]).exit_code == 0


def test_a_gpu_expert_format_is_its_format_and_its_kernel(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files: on a GPU its entry is chosen by the format alone; the result is the plain function's."""
    registry.load_providers()
    point = EntryPoint("toy", "toy_kernel", registry.PROVIDER_GROUP)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.setattr(routed_experts, "entries", list(routed_experts.entries))
    try:
        registry.load_providers()
        layer = KimiK2ForCausalLM.from_pretrained(toy, keep_quantized=True).get_submodule("model.layers.1.mlp")
        assert isinstance(layer, MoE)
        experts, x = layer.experts.stored(), torch.randn(5, 256)
        indices, weights = torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
        with FakeTensorMode(allow_non_fake_inputs=True):
            there = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (x, indices, weights)]
            chosen = routed_experts.choose(there[0], experts, *there[1:])
        assert chosen.name == "toy_int8"
        found, wanted = (call(x, experts, indices, weights) for call in (chosen.call, routed_experts.plain.call))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    finally:
        monkeypatch.undo()
        registry.pin("")


def test_a_member_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_k2.cli.app import app

    for preset in config_module.PRESET_DIR.glob("*.json"):
        (tmp_path / preset.name).write_text(preset.read_text())
    member = json.loads((tmp_path / "kimi-k2-instruct-0905.json").read_text()) | {"num_hidden_layers": 7}
    (tmp_path / "kimi-k2-toy.json").write_text(json.dumps(member))
    changes = {"like": "kimi-k2-toy", "num_hidden_layers": 5, "rope_scaling": {"factor": 8.0}}
    (tmp_path / "kimi-k2-other.json").write_text(json.dumps(changes))
    monkeypatch.setattr(config_module, "PRESET_DIR", tmp_path)
    toy, other = (KimiK2Config.load(f"kimi-k2-{name}") for name in ("toy", "other"))
    assert (toy.num_hidden_layers, other.num_hidden_layers) == (7, 5)
    assert toy.rope_scaling is not None
    assert other.rope_scaling == toy.rope_scaling.model_copy(update={"factor": 8.0})
    for command in (["plan", "kimi-k2-toy"], ["make-checkpoint", str(tmp_path / "made"), "--model", "kimi-k2-toy"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert KimiK2Config.from_pretrained(tmp_path / "made").routed_scaling_factor == member["routed_scaling_factor"]
