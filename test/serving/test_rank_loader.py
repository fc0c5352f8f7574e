"""Weights as an engine's loader gives them, in any order: each rank holds what a conversion writes for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, MissingTensorError, TensorShapeError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Experts
from kimi_k2.parallel.apply import parallelize
from kimi_k2.serving.paged.weights import RankLoader
from kimi_k2.sharding.layout import STORED, Layout
from kimi_k2.sharding.manifest import WEIGHTS, rank_file_name
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.presharder import Presharder


def tensors(directory: Path, config: KimiK2Config) -> list[tuple[str, Tensor]]:
    with CheckpointReader.for_config(directory, config) as reader:
        found = [(config.tensor_prefix + name, tensor.clone()) for name, tensor in reader.stream()]
    random.Random(0).shuffle(found)
    return found


def new_loader(config: KimiK2Config, layout: Layout, rank: int, redundant: int = 0) -> RankLoader:
    with torch.device("meta"):
        model = KimiK2ForCausalLM(config, dtype=torch.bfloat16, keep_quantized=True)
    part = parallelize(model, layout, rank, communicate=False, redundant=redundant)
    return RankLoader(part, make_plan(config, layout), rank)


def same(found: KimiK2ForCausalLM, wanted: KimiK2ForCausalLM) -> None:
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    ("source", "moe_tp", "moe_ep"),
    [("wide", 2, 1), ("wide", 1, 2), ("thinking", 2, 2), ("k2.5", 2, 1), ("bf16", 4, 1), ("fp8", 1, 1)],
)
def test_each_rank_holds_what_a_conversion_writes(
    checkpoints: dict[str, Path], wide: Path, tmp_path: Path, source: str, moe_tp: int, moe_ep: int
) -> None:
    directory = wide if source == "wide" else checkpoints[source]
    config, layout = KimiK2Config.from_pretrained(directory), Layout(moe_tp, moe_ep, target="cuda", experts=STORED)
    Presharder(directory, tmp_path / "ranks", layout).run()
    weights = tensors(directory, config)
    for rank in range(layout.ranks):
        loader = new_loader(config, layout, rank)
        names = loader.load(weights)
        loader.check()
        assert names == set(loader.planned)
        with torch.device("meta"):
            other = KimiK2ForCausalLM(config, dtype=torch.bfloat16, keep_quantized=True)
        parallelize(other, layout, rank, communicate=False)
        file = tmp_path / "ranks" / WEIGHTS / rank_file_name(rank)
        for name, tensor in load_file(file).items():
            module, _, suffix = name.rpartition(".")
            getattr(other.get_submodule(module), suffix).copy_(tensor)
        same(loader.model, other)


def test_experts_in_any_rows(checkpoints: dict[str, Path]) -> None:
    """As an engine has moved them by layer, some held twice; the model's numbers of a rank's rows follow each other."""
    config = KimiK2Config.from_pretrained(checkpoints["thinking"])
    whole = new_loader(config, Layout(1, target="cuda", experts=STORED), 0)
    loader = new_loader(config, Layout(1, 2, target="cuda", experts=STORED), 1, redundant=4)
    count = config.n_routed_experts // 2 + 2
    rows = {layer: [(7 * row + layer) % (count - 3) for row in range(count)] for layer in (1, 2)}
    loader.held = lambda planned: rows[planned.layer]
    for one in (whole, loader):
        one.load(tensors(checkpoints["thinking"], config))
        one.check()
    for layer, experts in rows.items():
        name = f"model.layers.{layer}.mlp.experts"
        held, of = (cast(Experts, one.model.get_submodule(name)) for one in (loader, whole))
        assert (held.first_expert, held.num_experts, held.total_experts) == (count, count, 2 * count)
        for name, tensor in held.named_buffers():
            assert torch.equal(tensor, of.get_buffer(name)[experts]), name
    with pytest.raises(ConfigError, match="3 do not divide among 2 ranks"):
        new_loader(config, loader.plan.layout, 0, redundant=3)


def test_tensors_that_do_not_fit_are_named(checkpoints: dict[str, Path]) -> None:
    directory = checkpoints["thinking"]
    config, layout = KimiK2Config.from_pretrained(directory), Layout(1, target="cuda", experts=STORED)
    weights = dict(tensors(directory, config))
    expert = "model.layers.2.mlp.experts.7.up_proj.weight_packed"
    with pytest.raises(TensorShapeError, match=r"experts\.7\.up_proj"):
        new_loader(config, layout, 0).load([(expert, weights[expert][:, :-1])])
    with pytest.raises(TensorShapeError, match=r"model\.norm\.weight"):
        new_loader(config, layout, 0).load([("model.norm.weight", torch.zeros(3))])
    taller = "model.layers.1.self_attn.o_proj.weight"  # whose part a rank could cut all the same
    with pytest.raises(TensorShapeError, match=r"self_attn\.o_proj"):
        new_loader(config, layout, 0).load([(taller, weights[taller].repeat(2, 1))])
    for name in ("model.layers.9.mlp.gate.weight", "model.layers.1.mlp.experts.0.up_proj.bias"):
        with pytest.raises(CheckpointError, match="no such tensor"):
            new_loader(config, layout, 0).load([(name, torch.zeros(3))])


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.layers.1.mlp.experts.3.down_proj.weight_scale"])
def test_a_part_that_never_came_is_named(checkpoints: dict[str, Path], left_out: str) -> None:
    directory = checkpoints["k2.5"]
    config, layout = KimiK2Config.from_pretrained(directory), Layout(1, target="cuda", experts=STORED)
    loader = new_loader(config, layout, 0)
    loader.load(
        [(name, tensor) for name, tensor in tensors(directory, config) if name != f"{config.tensor_prefix}{left_out}"]
    )
    with pytest.raises(MissingTensorError, match=r"lm_head|experts\.down_proj_scale"):
        loader.check()


def test_leftovers_of_a_checkpoint_are_passed_over(checkpoints: dict[str, Path]) -> None:
    config = KimiK2Config.from_pretrained(checkpoints["fp8"])
    loader = new_loader(config, Layout(1, target="cuda", experts=STORED), 0)
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.patch_embed.proj.weight")
    assert loader.load([(name, torch.zeros(1)) for name in names]) == set()
