"""A stored format, a Neuron expert format, a GPU's expert kernel, a member: one file each, no change elsewhere."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from command import kimi
from rewritten import tensors_of
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2 import config as config_module
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import MissingShardError, NonfiniteError, OrphanScaleError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import MoE
from kimi_k2.ops import registry
from kimi_k2.ops.experts import routed_experts
from kimi_k2.quantization.stored import Stored
from kimi_k2.sharding.experts import ExpertFormat, Matrix, register
from kimi_k2.sharding.manifest import rank_file_name
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the toy format; the only thing that knows of it is its file. `test_stored_forms` runs it."""
    importlib.import_module("toy_format")
    directory = tmp_path_factory.mktemp("toy")
    write_synthetic_checkpoint(directory, with_format(tiny_config(), "toy-int8"), seed=7)
    return directory


def test_damage_is_named(toy: Path, tmp_path: Path) -> None:
    config = KimiK2Config.from_pretrained(toy)
    tensors = tensors_of(toy)
    (tmp_path / "config.json").write_text((toy / "config.json").read_text())
    with pytest.raises(MissingShardError):
        CheckpointReader.for_config(tmp_path, config)
    scale = tensors.pop(f"{EXPERT}.weight_row_scale")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(OrphanScaleError, match=re.escape(f"{EXPERT}.weight_row_scale")):
        CheckpointReader.for_config(tmp_path, config)
    save_file({**tensors, f"{EXPERT}.weight_row_scale": -scale}, tmp_path / "model.safetensors")
    with pytest.raises(NonfiniteError, match="negative") as caught:
        KimiK2ForCausalLM.from_pretrained(tmp_path)
    assert caught.value.tensor == f"{EXPERT}.weight_row_scale"


@register
@dataclass(frozen=True)
class HalvedExperts(ExpertFormat):
    """A Neuron expert format in one class: half of each weight, and a scale of 2 an input column."""

    name = "toy-halved"
    quantization_type = "toy_halved"

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        return {"weight": (dtype, (rows, columns)), "scale": (torch.float32, (rows, 1))}

    def convert(self, matrix: Matrix, dtype: torch.dtype, error: Any) -> Stored:
        weight = matrix.dequantized(dtype) / 2
        return {"weight": weight, "scale": torch.full((matrix.rows, 1), 2.0)}


def test_a_neuron_expert_format_is_one_class(fp8: Path, tmp_path: Path) -> None:

    for experts in ("toy-halved", "bf16"):
        kimi("convert", fp8, tmp_path / experts, "--tp", "2", "--experts", experts)
    halved, plain = (load_file(tmp_path / name / "weights" / rank_file_name(1)) for name in ("toy-halved", "bf16"))
    root = "layers.2.mlp.experts"
    for name in (f"{root}.gate_up_proj", f"{root}.down_proj"):
        product = halved[f"{name}.weight"] * halved[f"{name}.scale"].to(torch.bfloat16)
        assert torch.equal(product, plain[f"{name}.weight"])
    kimi("verify", tmp_path / "toy-halved")


def test_a_gpu_expert_format_is_its_format_and_its_kernel(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files: on a GPU its entry is chosen by the format alone; the result is the plain function's."""
    registry.load_providers()
    point = EntryPoint("toy", "toy_kernel", registry.PROVIDER_GROUP)
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
        kimi(*command)
    assert KimiK2Config.from_pretrained(tmp_path / "made").routed_scaling_factor == member["routed_scaling_factor"]
