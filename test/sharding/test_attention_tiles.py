"""Attention's tiles in the ranks' files: what they multiply, against the checkpoint's own matrices in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.sharding.attention_tiles import check_sizes
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import check_made_for, made_layout, rank_file_name
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import verify
from kimi_k2.sharding.whole import load_whole_state_dict
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

from .test_early_qkv_a import matrix

SIZES: dict[str, Any] = {
    "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "v_head_dim": 128, "qk_rope_head_dim": 40,
    "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2,
    "hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 8,
}  # fmt: skip
ROPE, NOPE = 40, 128  # 1344 rows of queries: half of the last FP8 block is filled


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in BF16 and in FP8 blocks of 128 x 128."""
    root = tmp_path_factory.mktemp("sources")
    for fmt in ("bf16", "fp8"):
        write_synthetic_checkpoint(root / fmt, with_format(tiny_config(**SIZES), fmt), seed=2)
    return {fmt: root / fmt for fmt in ("bf16", "fp8")}


def held(file: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor | None]:
    root = f"layers.1.self_attn.tiles.{name}"
    scale = file.get(f"{root}.scale")
    return file[f"{root}.weight"].double(), None if scale is None else scale.double()


def by_inputs(weight: Tensor, groups: Tensor | None) -> Tensor:
    """Tiles [128, chunks, rows], value [p, c, j] of row j and column c * 128 + p, as [rows, chunks * 128].

    Scales are [128, groups, chunks]: row g * 128 + p.
    """
    rows = weight.permute(2, 1, 0)
    if groups is not None:
        rows = rows * groups.transpose(0, 1).flatten(0, 1).unsqueeze(2)
    return rows.flatten(1)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal but for float32's rounding, and for the halves of the smallest FP8 values, which e4m3 rounds."""
    return found.shape == wanted.shape and float((found - wanted).norm() / wanted.norm()) < 1e-4


def layout_of(kind: str, ranks: int, group: int = 0) -> Layout:
    """FP8 tiles are those of FP8 experts whose ranks share a cache."""
    experts = "tiles" if kind == "fp8" else "bf16_tiles"
    group = group or (2 if kind == "fp8" else 0)
    return Layout(ranks, experts=experts, dtype=torch.float32, decode="layers", query_group=group)


@pytest.mark.parametrize(
    ("fmt", "kind", "ranks"),
    [("bf16", "bf16", 8), ("bf16", "bf16", 4), ("fp8", "bf16", 8), ("fp8", "bf16", 4), ("fp8", "fp8", 8)],
)
def test_tiles_hold_the_checkpoints_values(
    sources: dict[str, Path], tmp_path: Path, fmt: str, kind: Any, ranks: int
) -> None:
    config = KimiK2Config.from_pretrained(sources[fmt])
    layout = layout_of(kind, ranks)
    Presharder(sources[fmt], tmp_path, layout).run()
    assert len(list(verify(tmp_path))) == ranks
    assert made_layout(tmp_path).attention_tiles(config) == kind
    with CheckpointReader.for_config(sources[fmt], config) as reader:
        q_b, kv_b, o = (
            matrix(reader, config, f"model.layers.1.self_attn.{name}") for name in ("q_b_proj", "kv_b_proj", "o_proj")
        )
    own = 8 // ranks
    for rank in range(ranks):
        file = load_file(tmp_path / "weights" / rank_file_name(rank))
        weight, scale = held(file, "q_b")
        rotary = own * ROPE
        plain = by_inputs(weight[:, :, : own * NOPE], None if scale is None else scale[:, :own])
        # Rotary rows' last group may be part empty.
        spread = None if scale is None else scale[:, own:].transpose(0, 1).flatten(0, 1)[:rotary]
        turned = by_inputs(weight[:, :, own * NOPE :], None)
        if spread is not None:
            turned = turned * spread.repeat_interleave(128, 1)
        uk, uk_scale = held(file, "w_uk")
        uv, uv_scale = held(file, "w_uv")
        for head in range(own):
            number = rank * own + head
            rows = q_b[number * (NOPE + ROPE) : (number + 1) * (NOPE + ROPE)]
            assert same(plain[head * NOPE : (head + 1) * NOPE], rows[:NOPE])
            assert same(turned[head * ROPE : (head + 1) * ROPE], rows[NOPE:])
            keys, values = kv_b[number * 256 : (number + 1) * 256].split(128)
            of_column = 1 if uk_scale is None else uk_scale[head, :, :, 0].T.flatten()
            assert same(uk[head, :, 0] * of_column, keys)
            of_row = None if uv_scale is None else uv_scale[head, :, :1]
            assert same(by_inputs(uv[head], of_row), values)
        weight, scale = held(file, "o")
        assert same(by_inputs(weight, scale), o[:, rank * own * 128 : (rank + 1) * own * 128])


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("group", [8, 4, 2])
def test_tiles_of_a_group_are_those_of_its_ranks(
    sources: dict[str, Path], tmp_path: Path, kind: Any, group: int
) -> None:
    """Every rank of a group has what its ranks have of q_b and W_UK, one half of the heads for each core."""
    layout = layout_of(kind, 8, group)
    Presharder(sources["fp8"], tmp_path, layout).run()
    assert len(list(verify(tmp_path))) == 8
    assert made_layout(tmp_path).query_group == group
    files = [load_file(tmp_path / "weights" / rank_file_name(rank)) for rank in range(8)]
    assert not any("layers.0." in name and ".tiles." in name for name in files[0])  # a dense layer
    each = group // 2
    for rank, file in enumerate(files):
        q_b, q_b_scale = held(file, "group_q_b")
        w_uk, w_uk_scale = held(file, "group_w_uk")
        assert q_b.shape == (2, 128, 2, each * (NOPE + ROPE))
        for core in range(2):
            for place in range(each):
                owner = files[rank // group * group + core * each + place]
                (own, own_scale), (own_uk, own_uk_scale) = held(owner, "q_b"), held(owner, "w_uk")
                plain, first = slice(place * NOPE, (place + 1) * NOPE), each * NOPE + place * ROPE
                assert torch.equal(q_b[core, :, :, plain], own[:, :, :NOPE])
                assert torch.equal(q_b[core, :, :, first : first + ROPE], own[:, :, NOPE:])
                assert torch.equal(w_uk[core, place], own_uk[0])
                if q_b_scale is None or own_scale is None or w_uk_scale is None or own_uk_scale is None:
                    assert kind == "bf16"
                    continue
                assert torch.equal(q_b_scale[core, :, place], own_scale[:, 0])
                rows = q_b_scale[core, :, each:].transpose(0, 1).flatten(0, 1)
                assert torch.equal(rows[place * ROPE : (place + 1) * ROPE], own_scale[:ROPE, 1])
                assert torch.equal(w_uk_scale[core, place], own_uk_scale[0])


def test_the_whole_state_dict_is_what_ranks_hold(sources: dict[str, Path], tmp_path: Path) -> None:
    config = KimiK2Config.from_pretrained(sources["fp8"])
    layout = layout_of("bf16", 4)
    Presharder(sources["fp8"], tmp_path, layout).run()
    ranks = [load_file(tmp_path / "weights" / rank_file_name(rank)) for rank in range(4)]
    held = expert_formats()[layout.experts].for_layout(config, layout)
    with CheckpointReader.for_config(sources["fp8"], config) as reader:
        whole = load_whole_state_dict(reader, config, torch.float32, held, decode="layers", ranks=4)
    cut = {tensor.name: tensor.dim for tensor in make_plan(config, layout).tensors if ".tiles." in tensor.name}
    assert len(cut) == 4
    for name, dim in cut.items():
        assert dim is not None
        joined = torch.cat([one[name].float() for one in ranks], dim=dim)
        assert torch.equal(whole[name].float(), joined)


def test_files_of_one_form_are_not_taken_for_another(sources: dict[str, Path], tmp_path: Path) -> None:
    config = KimiK2Config.from_pretrained(sources["fp8"])
    layers = layout_of("bf16", 4)
    Presharder(sources["fp8"], tmp_path, layers).run()
    check_made_for(tmp_path, config, layers)
    for other in (replace(layers, decode=None), replace(layers, experts="tiles")):
        with pytest.raises(ConfigError) as caught:
            check_made_for(tmp_path, config, other)
        assert caught.value.field in ("decode", "experts")


def test_fp8_is_of_checkpoints_in_blocks(sources: dict[str, Path]) -> None:
    """Others, with the same layout, keep their values in BF16; of one whose layers differ FP8 is refused."""
    config = KimiK2Config.from_pretrained(sources["bf16"])
    held = {one.dtype for one in make_plan(config, layout_of("fp8", 8)).tensors if ".tiles." in one.name}
    assert held == {layout_of("fp8", 8).dtype}
    config = KimiK2Config.from_pretrained(sources["fp8"])
    assert config.quantization is not None
    ignored = config.quantization.model_copy(update={"ignore": ("model.layers.1.self_attn.o_proj",)})
    with pytest.raises(ConfigError) as caught:
        make_plan(config.model_copy(update={"quantization": ignored}), layout_of("fp8", 8))
    assert caught.value.field == "attention_tiles"


@pytest.mark.parametrize("field", ["qk_nope_head_dim", "v_head_dim"])
def test_heads_that_fill_no_tile_are_refused(field: str) -> None:
    for size in (64, 256):
        with pytest.raises(ConfigError, match="tiles hold 128") as caught:
            check_sizes(tiny_config(**SIZES | {field: size}))
        assert caught.value.field == field


def test_a_group_of_ranks_with_two_heads_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Presharder(sources["fp8"], tmp_path, layout_of("bf16", 4, 2))
    assert caught.value.field == "num_attention_heads"
