"""Weights as an engine's loader gives them, in any order, once or again: what a rank's steps read is what it should be.

That of a conversion's file of the rank; and where other weights come later, that of a fresh model, where it was before.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.layer_step import LayerStep
from kimi_k2.errors import CheckpointError, MissingTensorError, TensorDtypeError, TensorShapeError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Experts
from kimi_k2.parallel.apply import parallelize
from kimi_k2.serving.paged.heads import pad_heads
from kimi_k2.serving.paged.model import PagedModel, Share
from kimi_k2.serving.paged.weights import RankLoader
from kimi_k2.sharding.layout import STORED, Layout
from kimi_k2.sharding.manifest import WEIGHTS, rank_file_name
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

ONE = Layout(1, target="cuda", experts=STORED)


def weights(directory: Path, config: KimiK2Config) -> list[tuple[str, Tensor]]:
    """In no order."""
    with CheckpointReader.for_config(directory, config) as reader:
        found = [(config.tensor_prefix + name, tensor.clone()) for name, tensor in reader.stream()]
    random.Random(0).shuffle(found)
    return found


def part_of(config: KimiK2Config, layout: Layout, rank: int) -> KimiK2ForCausalLM:
    """A rank's, without values."""
    with torch.device("meta"):
        model = KimiK2ForCausalLM(config, dtype=torch.bfloat16, keep_quantized=True)
    return parallelize(model, layout, rank, communicate=False)


def loader_of(config: KimiK2Config, layout: Layout = ONE, rank: int = 0) -> RankLoader:
    return RankLoader(part_of(config, layout, rank), make_plan(config, layout), rank)


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() > set()
    for name, tensor in found.items():
        assert torch.equal(tensor.contiguous().view(torch.uint8), wanted[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize(
    ("source", "moe_tp", "moe_ep"),
    [("wide", 2, 1), ("wide", 1, 2), ("thinking", 2, 2), ("k2.5", 2, 1), ("bf16", 4, 1), ("fp8", 1, 1),
     ("nvfp4", 2, 2), ("nvfp4-packed", 2, 1), ("mxfp4", 2, 1), ("mxfp4-packed", 1, 2)],
)  # fmt: skip
def test_each_rank_holds_what_a_conversion_writes(
    checkpoints: dict[str, Path], wide: Path, tmp_path: Path, source: str, moe_tp: int, moe_ep: int
) -> None:
    directory = {**checkpoints, "wide": wide}.get(source, tmp_path / "four_bits")
    if directory.parent == tmp_path:
        write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2-instruct-0905"), source), seed=4)
    config, layout = KimiK2Config.from_pretrained(directory), Layout(moe_tp, moe_ep, target="cuda", experts=STORED)
    Presharder(directory, tmp_path / "ranks", layout).run()
    for rank in range(layout.ranks):
        loader, other = loader_of(config, layout, rank), part_of(config, layout, rank)
        assert loader.load(weights(directory, config)) == set(loader.planned)
        loader.check()
        for name, tensor in load_file(tmp_path / "ranks" / WEIGHTS / rank_file_name(rank)).items():
            module, _, suffix = name.rpartition(".")
            getattr(other.get_submodule(module), suffix).copy_(tensor)
        same(loader.model.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-packed", "mxfp4", "mxfp4-packed"])
def test_four_bits_outside_the_experts_are_held_in_bf16(name: str, tmp_path: Path) -> None:
    """As checkpoints have it that leave attention alone out; the experts stay as they are stored."""
    write_synthetic_checkpoint(tmp_path, with_format(tiny_config("kimi-k2-instruct-0905"), name), seed=4)
    config = KimiK2Config.from_pretrained(tmp_path)
    assert config.quantization is not None and config.quantization.quantizes(
        "model.layers.1.mlp.shared_experts.up_proj"
    )
    held = serving(tmp_path, config, 4).plain.state_dict()
    four_bits = {key.rpartition(".")[0] for key, tensor in held.items() if tensor.dtype == torch.uint8}
    assert four_bits == {f"model.layers.{number}.mlp.experts" for number in (1, 2)}


def test_tensors_that_do_not_fit_are_named(checkpoints: dict[str, Path]) -> None:
    config = KimiK2Config.from_pretrained(checkpoints["thinking"])
    given = dict(weights(checkpoints["thinking"], config))
    expert = "model.layers.2.mlp.experts.7.up_proj.weight_packed"
    taller = "model.layers.1.self_attn.o_proj.weight"  # whose part a rank could cut all the same
    for name, tensor, error, said in (
        (expert, given[expert][:, :-1], TensorShapeError, r"experts\.7\.up_proj"),
        ("model.norm.weight", torch.zeros(3), TensorShapeError, r"model\.norm\.weight"),
        (taller, given[taller].repeat(2, 1), TensorShapeError, r"self_attn\.o_proj"),
        ("model.layers.9.mlp.gate.weight", torch.zeros(3), CheckpointError, "no such tensor"),
        ("model.layers.1.mlp.experts.0.up_proj.bias", torch.zeros(3), CheckpointError, "no such tensor"),
    ):
        with pytest.raises(error, match=said):
            loader_of(config).load([(name, tensor)])
    leftovers = [f"model.layers.0.self_attn.{name}" for name in ("rotary_emb.inv_freq", "k_proj.k_scale", "v_scale")]
    leftovers.append("vision_tower.patch_embed.proj.weight")
    assert loader_of(config).load([(name, torch.zeros(1)) for name in leftovers]) == set()


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.layers.1.mlp.experts.3.down_proj.weight_scale"])
def test_a_part_that_never_came_is_named(checkpoints: dict[str, Path], left_out: str) -> None:
    config = KimiK2Config.from_pretrained(checkpoints["k2.5"])
    loader, given = loader_of(config), weights(checkpoints["k2.5"], config)
    loader.load([(name, tensor) for name, tensor in given if name != f"{config.tensor_prefix}{left_out}"])
    with pytest.raises(MissingTensorError, match=r"lm_head|experts\.down_proj_scale"):
        loader.check()


class Reversed:
    """An order of a kernel's."""

    def restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {suffix: tensor.view(torch.uint8).flip(-1).view(tensor.dtype) for suffix, tensor in tensors.items()}


@pytest.fixture
def _in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are in a kernel's order."""

    def put(model: KimiK2ForCausalLM) -> None:
        for module in model.modules():
            if isinstance(module, Experts) and module.stored().down.order is None:
                held = module.stored()
                for weight in (held.gate_up, held.down):
                    for suffix, tensor in Reversed().restore(weight.tensors).items():
                        weight.tensors[suffix].copy_(tensor)
                gate_up, down = (replace(weight, order=Reversed()) for weight in (held.gate_up, held.down))
                module.adopt(replace(held, gate_up=gate_up, down=down))

    monkeypatch.setattr(KimiK2ForCausalLM, "prepare", put)


def serving(directory: Path, config: KimiK2Config, heads: int) -> PagedModel:
    held: Any = [None] * config.num_hidden_layers
    group: Any = None
    model = PagedModel(config, Share(ONE, 0, group), held, torch.bfloat16, torch.device("cpu"))
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


@pytest.mark.usefixtures("_in_order")
@pytest.mark.parametrize(("name", "heads", "asleep"), [
    ("bf16", 8, False), ("ragged", 4, False), ("wide", 8, False), ("thinking", 8, False), ("fp8", 8, True),
    ("thinking", 4, True),
])  # fmt: skip
def test_as_in_a_fresh_model(
    name: str, heads: int, asleep: bool, checkpoints: dict[str, Path], wide: Path, tmp_path: Path
) -> None:
    """In two parts with a layer's experts in both, with heads of zeros.

    Behind a sleep that has kept none no step runs before all have come, whatever the memory held.
    """
    directory = {**checkpoints, "wide": wide, "ragged": tmp_path / "ragged"}[name]
    if name == "ragged":  # where blocks straddle what is stacked, which is then a copy
        ragged = tiny_config("kimi-k2-instruct-0905", moe_intermediate_size=192, q_lora_rank=192)
        write_synthetic_checkpoint(directory, ragged, seed=5)
    config = KimiK2Config.from_pretrained(directory)
    write_synthetic_checkpoint(tmp_path / "other", config, seed=77)
    model, fresh = serving(directory, config, heads), read(serving(tmp_path / "other", config, heads))
    places = {key: tensor.data_ptr() for key, tensor in read(model).items()}
    others = weights(tmp_path / "other", config)
    if asleep:
        for tensor in model.plain.state_dict().values():
            tensor.copy_(torch.full_like(tensor.to(torch.float32), 3).to(tensor.dtype))
        model.loader.forget()
    for part in ([], others[::2], others[1::2]):
        if asleep:
            with pytest.raises(MissingTensorError):
                model.batch(torch.zeros(1, dtype=torch.int64), torch.zeros(1, config.hidden_size))
        model.load(part)
    model.loader.check()
    assert not model.loader.emptied
    found = read(model)
    assert {key: tensor.data_ptr() for key, tensor in found.items()} == places
    same(found, fresh)


def test_weights_of_another_form(checkpoints: dict[str, Path]) -> None:
    """A trainer's BF16 weights for an engine that holds FP8 would be cast without their scales."""
    config = KimiK2Config.from_pretrained(checkpoints["fp8"])
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    given = dict(weights(checkpoints["fp8"], config))[name].to(torch.bfloat16)
    with pytest.raises(TensorDtypeError, match=r"experts\.0\.up_proj\.weight.*bfloat16, expected torch\.float8_e4m3fn"):
        serving(checkpoints["fp8"], config, 4).load([(name, given)])
