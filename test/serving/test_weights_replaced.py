"""Other weights in a model that has its layers: all that steps read is that of a fresh model, where it was before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.layer_step import LayerStep
from kimi_k2.errors import MissingTensorError, TensorDtypeError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Experts
from kimi_k2.serving.paged.heads import pad_heads
from kimi_k2.serving.paged.model import PagedModel
from kimi_k2.sharding.layout import STORED, Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config


class Reversed:
    """An order of a kernel's."""

    def restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {suffix: tensor.view(torch.uint8).flip(-1).view(tensor.dtype) for suffix, tensor in tensors.items()}


def put_in_order(model: KimiK2ForCausalLM) -> None:
    for module in model.modules():
        if isinstance(module, Experts) and module.stored().down.order is None:
            held = module.stored()
            for weight in (held.gate_up, held.down):
                for suffix, tensor in Reversed().restore(weight.tensors).items():
                    weight.tensors[suffix].copy_(tensor)
            gate_up, down = (replace(weight, order=Reversed()) for weight in (held.gate_up, held.down))
            module.adopt(replace(held, gate_up=gate_up, down=down))


def weights(directory: Path, config: KimiK2Config) -> list[tuple[str, Tensor]]:
    with CheckpointReader.for_config(directory, config) as reader:
        return [(name, tensor.clone()) for name, tensor in reader.stream()]


def serving(directory: Path, config: KimiK2Config, heads: int) -> PagedModel:
    held: list[Any] = [None] * config.num_hidden_layers
    layout, group, cpu = Layout(1, target="cuda", experts=STORED), None, torch.device("cpu")
    model = PagedModel(config, layout, 0, group, held, 64, torch.bfloat16, cpu)  # type: ignore[arg-type]
    model.load(weights(directory, config))
    for step in model.steps:
        pad_heads(step, heads)
    return model


def read(model: PagedModel) -> dict[str, Tensor]:
    """What steps read, by name."""

    def of(name: str, value: Any) -> dict[str, Tensor]:
        if isinstance(value, Tensor):
            return {name: value}
        if isinstance(value, tuple):
            return {key: one for number, part in enumerate(value) for key, one in of(f"{name}.{number}", part).items()}
        parts = getattr(value, "tensors", None) or {"gate_up": value.gate_up, "down": value.down}
        return {key: one for suffix, part in parts.items() for key, one in of(f"{name}.{suffix}", part).items()}

    found = dict(model.plain.state_dict())
    for number, step in enumerate(model.steps):
        assert isinstance(step, LayerStep)
        for field in ("qkv_a", "q_b", "o", "w_uk", "w_uv", "experts", "dense"):
            if getattr(step, field) is not None:
                found |= of(f"{number}.{field}", getattr(step, field))
    return found


@pytest.mark.parametrize(("name", "heads"), [("bf16", 8), ("ragged", 4), ("wide", 8), ("thinking", 8)])
def test_as_in_a_fresh_model(
    name: str, heads: int, checkpoints: dict[str, Path], wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two parts with a layer's experts in both, experts in a kernel's order, with heads of zeros."""
    monkeypatch.setattr(KimiK2ForCausalLM, "prepare", put_in_order)
    directory = {**checkpoints, "wide": wide, "ragged": tmp_path / "ragged"}[name]
    if name == "ragged":  # where blocks straddle what is stacked, which is then a copy
        config = tiny_config("kimi-k2-instruct-0905", moe_intermediate_size=192, q_lora_rank=192)
        write_synthetic_checkpoint(directory, config, seed=5)
    config = KimiK2Config.from_pretrained(directory)
    write_synthetic_checkpoint(tmp_path / "other", config, seed=77)
    model, fresh = serving(directory, config, heads), read(serving(tmp_path / "other", config, heads))
    places = {key: tensor.data_ptr() for key, tensor in read(model).items()}
    others = weights(tmp_path / "other", config)
    for part in (others[::2], others[1::2]):
        model.load(part)
    found = read(model)
    assert {key: tensor.data_ptr() for key, tensor in found.items()} == places
    assert found.keys() == fresh.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor.contiguous().view(torch.uint8), fresh[key].contiguous().view(torch.uint8)), key


@pytest.mark.parametrize(("name", "heads"), [("fp8", 8), ("thinking", 4)])
def test_weights_that_a_sleep_has_not_kept(
    name: str, heads: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step before all have come again; then all that steps read is there, whatever the memory held."""
    monkeypatch.setattr(KimiK2ForCausalLM, "prepare", put_in_order)
    config = KimiK2Config.from_pretrained(checkpoints[name])
    model, given = serving(checkpoints[name], config, heads), weights(checkpoints[name], config)
    fresh = {key: tensor.clone() for key, tensor in read(model).items()}
    for tensor in model.plain.state_dict().values():
        tensor.copy_(torch.full_like(tensor.to(torch.float32), 3).to(tensor.dtype))
    model.loader.forget()
    for part in ([], given[::2]):
        model.load(part)
        with pytest.raises(MissingTensorError):
            model.batch(torch.zeros(1, dtype=torch.int64), torch.zeros(1, config.hidden_size))
    model.load(given[1::2])
    model.loader.check()
    assert not model.loader.emptied
    found = read(model)
    assert found.keys() == fresh.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor.contiguous().view(torch.uint8), fresh[key].contiguous().view(torch.uint8)), key


def test_weights_of_another_form(checkpoints: dict[str, Path]) -> None:
    """A trainer's BF16 weights for an engine that holds FP8 would be cast without their scales."""
    config = KimiK2Config.from_pretrained(checkpoints["fp8"])
    model = serving(checkpoints["fp8"], config, 4)
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    given = dict(weights(checkpoints["fp8"], config))[name].to(torch.bfloat16)
    with pytest.raises(TensorDtypeError, match=r"experts\.0\.up_proj\.weight.*bfloat16, expected torch\.float8_e4m3fn"):
        model.load([(name, given)])
