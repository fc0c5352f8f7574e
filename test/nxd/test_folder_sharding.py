"""The folder's files of the ranks: streamed, and bit for bit what NxD cuts from the whole model."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_folder import options_of

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bf16 TP1": ("bf16", "TP1", {}),
    "bf16 TP4": ("bf16", "TP4", {}),
    "blocks TP2xEP2": ("fp8", "TP2xEP2", {"quantized": True}),
    "channels EP2": ("int4", "EP2", {"quantized": True, "quantization_type": "expert_wise_per_channel_symmetric"}),
    "K2.5 TP2": ("int4", "TP2", {}),
}


@pytest.fixture(autouse=True)
def mocked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """NxD's mocked ranks are no processes of gloo."""
    monkeypatch.delenv("NXD_CPU_MODE", raising=False)


def application(checkpoint: Path, layout: str, options: dict[str, Any]) -> Any:
    src = importlib.import_module("kimi_k2.contrib_model")
    neuron = src.KimiK2NeuronConfig(**options_of(layout, 1, save_sharded_checkpoint=True, **options))
    config = src.KimiK2InferenceConfig(neuron, load_config=src.load_kimi_config(checkpoint))
    return src.NeuronKimiK2ForCausalLM(str(checkpoint), config)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("case", CASES)
def test_files_are_what_nxd_cuts(case: str, tmp_path: Path) -> None:
    form, layout, options = CASES[case]
    checkpoint = tmp_path / "checkpoint"
    config = tiny_config("kimi-k2.5" if "K2.5" in case else "kimi-k2-instruct-0905", num_hidden_layers=2)
    write_synthetic_checkpoint(checkpoint, with_format(config, form), seed=5)
    app = application(checkpoint, layout, options)
    app.shard_weights(str(tmp_path))
    found = {
        rank: load_file(tmp_path / "weights" / f"tp{rank}_sharded_checkpoint.safetensors")
        for rank in range(app.neuron_config.tp_degree)
    }
    for rank, whole in enumerate(app.rank_weights(0, app.neuron_config.tp_degree)):
        same(found[rank], whole)
    by_nxd = app.get_builder().shard_checkpoint()
    assert len(by_nxd) == len(found)
    for rank, cut in enumerate(by_nxd):
        same(found[rank], cut)


def test_a_missing_and_a_foreign_tensor_are_named(tmp_path: Path) -> None:
    from kimi_k2.contrib_model.checkpoint import CheckpointError, CheckpointMapping, StateDictReader

    checkpoint = tmp_path / "checkpoint"
    write_synthetic_checkpoint(checkpoint, with_format(tiny_config(num_hidden_layers=2), "bf16"), seed=5)
    stored: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        stored |= load_file(file)
    config = application(checkpoint, "TP1", {}).config
    foreign = {**stored, "model.layers.1.mlp.extra.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"mlp\.extra"):
        list(CheckpointMapping(config, StateDictReader(foreign)).parameters())
    del stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    with pytest.raises(CheckpointError, match="e_score_correction_bias: missing"):
        list(CheckpointMapping(config, StateDictReader(stored)).parameters())


def test_a_bias_that_the_device_lost_is_named(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_synthetic_checkpoint(checkpoint, with_format(tiny_config(num_hidden_layers=2), "bf16"), seed=5)
    app = application(checkpoint, "TP1", {})
    (weights,) = app.rank_weights(0, 1)
    device = SimpleNamespace(weights=[dict(weights)], initialize=lambda *_: None)
    app.initialize(SimpleNamespace(nxd_model=device), [weights], 0)
    name = "layers.1.mlp.router.e_score_correction_bias"
    device.weights[0][name] = weights[name].to(torch.bfloat16).to(torch.float32)
    with pytest.raises(ValueError, match=name):
        app.initialize(SimpleNamespace(nxd_model=device), [weights], 0)
