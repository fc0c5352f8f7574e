"""Every tensor of every rank's file, by the formula that defines it, against weights that libraries dequantized.

Conversions are interrupted after their first layer and gone on with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rewritten import tensors_of
from safetensors.torch import load_file
from torch import Tensor

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.parity.reference import reference_state_dict
from kimi_k2.sharding.convert import NeuronMapping
from kimi_k2.sharding.experts import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import check_made_for, made_layout, rank_file_name
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import faults
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

SourceOf = Callable[[str], tuple[Path, dict[str, Tensor]]]
P = 128  # partitions
# What the kernel of whole layers takes; eleven layers do not sort by number.
LAYERS: dict[str, Any] = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 64,
    "n_routed_experts": 8,
}  # fmt: skip
# Several latents and heads; 1344 rows of queries: half of the last FP8 block is filled.
HEADS: dict[str, Any] = LAYERS | {
    "q_lora_rank": 256, "kv_lora_rank": 256, "qk_rope_head_dim": 40, "num_attention_heads": 8, "num_hidden_layers": 2,
    "num_key_value_heads": 8, "hidden_size": 512, "moe_intermediate_size": 256,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {"layers": LAYERS, "heads": HEADS}


@pytest.fixture(scope="session")
def source_of(checkpoints: dict[str, Path], wide: Path, tmp_path_factory: pytest.TempPathFactory) -> SourceOf:
    """A checkpoint by name, with its weights as transformers and compressed-tensors dequantize them, float32."""
    root = tmp_path_factory.mktemp("values")

    @functools.cache
    def find(name: str) -> tuple[Path, dict[str, Tensor]]:
        path = {**checkpoints, "wide": wide}.get(name, root / name)
        if not path.exists():
            sizes, fmt = name.split("-", 1)
            layers = {"num_hidden_layers": 11 if fmt == "bf16" else 3} | SIZES[sizes]
            write_synthetic_checkpoint(path, with_format(tiny_config(**layers), fmt), seed=2)
        return path, reference_state_dict(path)

    return find


def converted(source: Path, output: Path, layout: Layout) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """The manifest and all ranks' tensors."""

    def stop(layer: int, _: object) -> None:
        if layer == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Presharder(source, output, layout, on_layer=stop).run()
    manifest = Presharder(source, output, layout).run()
    assert list(faults(output)) == []
    return manifest, [load_file(output / "weights" / rank_file_name(rank)) for rank in range(layout.ranks)]


def piece(whole: Tensor, dim: int | None, parts: int, part: int) -> Tensor:
    """A part's rows or columns; a scale of all of them is every part's."""
    return whole if dim is None or whole.shape[dim] < parts else whole.chunk(parts, dim)[part]


NORMS = "input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"
DOWN = "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"
ATTENTION = {"self_attn.q_b_proj": 0, "self_attn.kv_b_proj": 0, "self_attn.o_proj": 1}
MLP = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}


class Rank:
    """What a rank of a layout for Neuron holds of a layer, products in float64, experts as [E, input, output]."""

    def __init__(self, state: dict[str, Tensor], config: KimiK2Config, layout: Layout, rank: int) -> None:
        self.state, self.config, self.layout, self.rank = state, config, layout, rank
        self.ranks, self.tp = layout.ranks, layout.moe_tp
        local = config.n_routed_experts // layout.moe_ep
        self.experts = range(rank // self.tp * local, (rank // self.tp + 1) * local)

    def weight(self, layer: int, name: str) -> Tensor:
        return self.state[f"model.layers.{layer}.{name}.weight"]

    def everywhere(self) -> dict[str, Tensor]:
        cut = ("model.embed_tokens", 1), ("model.norm", None), ("lm_head", 0)
        found = {name.removeprefix("model."): self.cut(self.state[f"{name}.weight"], dim) for name, dim in cut}
        return {**found, "rank_util.rank": torch.tensor([self.rank])}

    def cut(self, whole: Tensor, dim: int | None) -> Tensor:
        return piece(whole, dim, self.ranks, self.rank)

    def layer(self, layer: int) -> dict[str, Tensor]:
        layout, get = self.layout, functools.partial(self.weight, layer)
        found = {name: get(name) for name in NORMS}
        found["self_attn.qkv_a_proj"] = self.cut(torch.cat([get(name) for name in DOWN]), 0)
        moe = self.config.is_moe_layer(layer)
        tiles = layout.attention_tiles(self.config) if moe else ""
        if tiles != "bf16":
            found |= {name: self.cut(get(name), dim) for name, dim in ATTENTION.items()}
        if not moe:
            return found | {f"mlp.{name}": self.cut(get(f"mlp.{name}"), dim) for name, dim in MLP.items()}
        if tiles:
            found |= self.attention_tiles(layer)
        gate = get("mlp.gate")
        found["mlp.router.linear_router"] = gate
        bias = "mlp.gate.e_score_correction_bias"
        found["mlp.router.e_score_correction_bias"] = self.state[f"model.layers.{layer}.{bias}"]
        found |= self.mlps("mlp.experts", layer, [f"mlp.experts.{expert}" for expert in self.experts], self.tp)
        if layout.layers:
            found |= self.mlps("mlp.shared_experts", layer, ["mlp.shared_experts"], self.ranks)
        else:
            of_shared = {f"mlp.shared_experts.{name}": dim for name, dim in MLP.items()}
            found |= {name: self.cut(get(name), dim) for name, dim in of_shared.items()}
        if layout.layers:
            scaled = gate.double() * get("post_attention_layernorm")
            found["early_router.residual_weight"] = self.cut(scaled.T, 0)
            found["early_router.heads_weight"] = self.cut((scaled @ get("self_attn.o_proj").double()).T, 0)
        return found

    def mlps(self, root: str, layer: int, modules: list[str], parts: int) -> dict[str, Tensor]:
        """A stack of experts, each divided among `parts` ranks, and the next layer's projections of their output."""
        part, found, behind = self.rank % parts, dict[str, list[Tensor]](), None
        if self.layout.layers and layer + 1 < self.config.num_hidden_layers:
            gamma = self.weight(layer + 1, "input_layernorm")
            behind = torch.cat([self.weight(layer + 1, name) for name in DOWN]).double() * gamma
        for module in modules:
            gate, up, down = (self.weight(layer, f"{module}.{name}") for name in MLP)
            both = [piece(weight, 0, parts, part) for weight in (gate, up)]
            found.setdefault("gate_up_proj", []).append(torch.cat(both).T)
            found.setdefault("down_proj", []).append(piece(down, 1, parts, part).T)
            if behind is not None:
                found.setdefault("early_qkv_a", []).append(piece((behind @ down.double()).T, 0, parts, part))
        stacks = {f"{root}.{name}": torch.stack(values) for name, values in found.items()}
        return stacks if behind is None else {**stacks, "early_qkv_a.residual_weight": self.cut(behind.T, 0)}

    def attention_tiles(self, layer: int) -> dict[str, Tensor]:
        heads, group = self.config.num_attention_heads, self.layout.query_group
        q_b, kv_b = (self.weight(layer, name).unflatten(0, (heads, -1)) for name in list(ATTENTION)[:2])

        def queries(own: range) -> tuple[Tensor, Tensor]:
            """Rows without position of all heads, then the rotary ones; W_UK of the heads."""
            some = q_b[own.start : own.stop]
            return torch.cat((some[:, :P].flatten(0, 1), some[:, P:].flatten(0, 1))), kv_b[own.start : own.stop, :P]

        own = heads // self.ranks
        mine = range(self.rank * own, (self.rank + 1) * own)
        found = {**dict(zip(("q_b", "w_uk"), queries(mine), strict=True)), "w_uv": kv_b[mine.start : mine.stop, P:]}
        found["o"] = self.cut(self.weight(layer, "self_attn.o_proj"), 1)
        if group:  # one half of the group's heads for each core
            first, half = self.rank // group * group, group // 2
            cores = [queries(range(first + core * half, first + (core + 1) * half)) for core in range(2)]
            found |= {
                f"group_{name}": torch.stack(t)
                for name, t in zip(("q_b", "w_uk"), zip(*cores, strict=True), strict=True)
            }
        return {f"self_attn.tiles.{name}": value for name, value in found.items()}


def plain(root: str, weight: Tensor, scale: Tensor | None) -> Tensor:
    """What a file's tensor means, in float32, in the order of `Rank`."""
    if not weight.is_floating_point():
        return weight
    weight = weight.float()
    name = root.rpartition(".")[2].removeprefix("group_")
    if ".self_attn.tiles." in root and ".group_" in root:
        halves = zip(weight, [None, None] if scale is None else scale, strict=True)
        return torch.stack([plain(root.replace("group_", ""), *half) for half in halves])
    if ".self_attn.tiles." in root:
        if name in ("q_b", "o"):  # [p, c, j] is row j, column c * 128 + p; scales [p, g, c]: row g * 128 + p
            rows = weight.permute(2, 1, 0)
            factors = None if scale is None else scale.transpose(0, 1).flatten(0, 1)[: len(rows), :, None]
        elif name == "w_uk":  # scales [head, p, c, 1]: column c * 128 + p
            rows = weight
            factors = None if scale is None else scale[..., 0].transpose(1, 2).flatten(1)[:, None, None]
        else:  # [head, p, c, v] is row v, column c * 128 + p
            rows = weight.permute(0, 3, 2, 1)
            factors = None if scale is None else scale[:, :, 0, :, None]
        return (rows if factors is None else rows * factors).flatten(-2)
    if weight.dim() == 4:  # [e, p, c, j] is row j of gate, then of up, column c * 128 + p; scales [e, gate or up, c]
        weight = weight.transpose(1, 2).flatten(1, 2)
        scale = None if scale is None else scale.transpose(1, 2)
    if scale is None:
        return weight
    for dim in (1, 2):
        scale = scale.repeat_interleave(weight.shape[dim] // scale.shape[dim], dim)
    return weight * scale


def tolerated(root: str, source: str, layout: Layout) -> float:
    """Relative L2; 0 is equal in the layout's dtype."""
    experts = {"blockwise": 0.03, "tiles": 0.03, "per_channel": 0.036}.get(layout.experts, 0.0)
    if experts == 0.03 and ("fp8" in source):
        experts = 1e-4  # halves of the smallest values are rounded
    if "early_" in root:
        return max(1e-6, experts if experts > 1e-3 and ".mlp." in root else 0.0)
    if ".self_attn.tiles." in root:
        return 1e-4 if layout.query_group and layout.experts == "tiles" and "fp8" in source else 0.0
    if ".shared_experts." in root:  # in tiles where the checkpoint has FP8 blocks
        return experts if layout.layers and "fp8" in source else 0.0
    return experts if ".mlp.experts." in root else 0.0


def of_layers(tp: int, ep: int = 1, *, experts: str = "tiles", group: int = 0) -> Layout:
    return Layout(tp, ep, experts=experts, dtype=torch.float32, decode="layers", query_group=group)


PUBLISHED = ("fp8", "bf16", "thinking", "k2.5")
ROWS = [(name, Layout(2, 2, experts=e)) for name in PUBLISHED for e in ("bf16", "blockwise", "per_channel")]
ROWS += [("fp8", Layout(2))]
ROWS += [(f"layers-{fmt}", of_layers(*cut)) for fmt in ("fp8", "int4") for cut in ((1, 1), (2, 1), (1, 2))]
ROWS += [("layers-bf16", of_layers(*cut, experts="bf16_tiles")) for cut in ((1, 1), (2, 1), (1, 2))]
ROWS += [(f"heads-{fmt}", of_layers(ranks, experts="bf16_tiles")) for fmt in ("bf16", "fp8") for ranks in (8, 4)]
ROWS += [("heads-fp8", of_layers(8, experts=e, group=g)) for e in ("tiles", "bf16_tiles") for g in (8, 4, 2)]


def named(value: Any) -> str | None:
    if isinstance(value, Layout):
        return f"{value.moe_tp}x{value.moe_ep}-{value.experts}-{value.decode}-{value.query_group}"
    return None


@pytest.mark.parametrize(("source", "layout"), ROWS, ids=named)
def test_neuron(source_of: SourceOf, tmp_path: Path, source: str, layout: Layout) -> None:
    directory, state = source_of(source)
    config = KimiK2Config.from_pretrained(directory)
    manifest, files = converted(directory, tmp_path, layout)
    assert made_layout(tmp_path).decode == layout.decode
    check_made_for(tmp_path, config, layout)
    rounded = dict.fromkeys(range(config.num_hidden_layers), 0)
    for rank, file in enumerate(files):
        has = Rank(state, config, layout, rank)
        wanted = has.everywhere()
        for layer in range(config.num_hidden_layers):
            wanted |= {f"layers.{layer}.{name}": value for name, value in has.layer(layer).items()}
        roots = {name.removesuffix(".weight"): name for name in file if not name.endswith(".scale")}
        assert roots.keys() == wanted.keys()
        for root, name in roots.items():
            found, expected = plain(root, file[name], file.get(f"{root}.scale")), wanted[root]
            assert found.shape == expected.shape, root
            if not (most := tolerated(root, source, layout)):
                dtype = file[name].dtype
                assert torch.equal(found.to(dtype), expected.to(dtype)), root
                continue
            assert float((found - expected).norm() / expected.norm()) < most, root
            if ".mlp.experts." in root and "early" not in root:
                rounded[int(root.split(".")[1])] += int((found != expected).sum())
    errors = manifest["errors"]
    if expert_formats()[layout.experts].quantization_type is not None:
        assert 0 < errors["total"]["relative_l2"] < tolerated(".mlp.experts.", source, layout)
    if layout.experts in ("tiles", "blockwise") and "fp8" in source:
        changed = {int(layer): error["changed"] for layer, error in errors["layers"].items()}
        assert changed == {layer: rounded[layer] for layer in changed}
    with CheckpointReader.for_config(directory, config) as reader:
        whole = NeuronMapping(config, layout, reader.names(), reader.get).state_dict()
    planned = {tensor.name: tensor for tensor in make_plan(config, layout).tensors}
    assert whole.keys() == planned.keys()
    for name, value in whole.items():
        of_ranks = ".mlp.experts." in name or ".tiles.group_" in name  # one rank's behind the other's
        for rank in {0, 1 % layout.ranks, layout.ranks - 1}:  # of the second a group's order is seen
            found = value.chunk(layout.ranks)[rank] if of_ranks else planned[name].local(value, rank)
            assert torch.equal(found.contiguous().view(torch.uint8), files[rank][name].view(torch.uint8)), name


STORED = [(name, Layout(1, 2, "cuda", e)) for name in ("wide", *PUBLISHED[1:]) for e in ("stored", "bf16")]


# Scales of blocks are cut, those of rows are every rank's.
STORED += [(name, Layout(2, 1, "cuda", "stored")) for name in ("wide", "layers-fp8-channel")]


@pytest.mark.parametrize(("source", "layout"), STORED, ids=named)
def test_cuda(source_of: SourceOf, tmp_path: Path, source: str, layout: Layout) -> None:
    """The checkpoint's own bytes, or its weights in BF16, with routed experts stacked."""
    directory, state = source_of(source)
    config = KimiK2Config.from_pretrained(directory)
    _, files = converted(directory, tmp_path, layout)
    stored = {name.removeprefix("language_model."): tensor for name, tensor in tensors_of(directory).items()}
    if layout.experts == "bf16":
        stored = {
            name: value.to(torch.bfloat16 if name.endswith("weight") else value.dtype) for name, value in state.items()
        }
    wanted = {"model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"}
    wanted |= {
        name for name in stored if name.startswith("model.layers.") and not name.endswith(("_shape", "inv_freq"))
    }
    for rank, file in enumerate(files):
        local = config.n_routed_experts // layout.moe_ep
        group, part = divmod(rank, layout.moe_tp)
        unseen = {name for name in wanted if ".mlp.experts." not in name}
        for name, found in file.items():
            module, _, suffix = name.rpartition(".")
            if module.endswith(".mlp.experts"):
                projection, _, more = suffix.partition("_proj")
                names = ("gate_proj", "up_proj") if projection == "gate_up" else ("down_proj",)
                each = [
                    torch.cat([
                        piece(stored[f"{module}.{expert}.{p}.weight{more}"], MLP[p], layout.moe_tp, part) for p in names
                    ])
                    for expert in range(group * local, (group + 1) * local)
                ]  # fmt: skip
                expected = torch.stack([expert.view(torch.uint8) for expert in each]).view(each[0].dtype)
            else:
                unseen.remove(name)
                cut = {
                    **MLP,
                    **{key.rpartition(".")[2]: dim for key, dim in ATTENTION.items()},
                    "lm_head": 0,
                    "embed_tokens": 0,
                }
                expected = piece(stored[name], cut.get(module.rpartition(".")[2]), layout.ranks, rank)
            assert found.dtype == expected.dtype, name
            assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)), name
        assert not unseen
