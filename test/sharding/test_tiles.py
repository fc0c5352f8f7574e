"""Experts in tiles for the NKI kernel: every value in its place and equal to the checkpoint's, on every rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.fp8_block import dequantize_fp8_block
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import rank_file_name
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import verify
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

# An expert's real width, heads and latents that 64 ranks can divide: the presets' own cuts.
WIDE: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 64,
    "kv_lora_rank": 48, "qk_rope_head_dim": 16, "moe_intermediate_size": 2048, "hidden_size": 2176,
    "n_routed_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 128,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {"tiny": {"moe_intermediate_size": 128}, "wide": WIDE}
LAYER = 1
EXACT = 1 << 3  # e4m3 codes below this one, sign aside, are subnormal


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiles")
    for name, sizes in SIZES.items():
        write_synthetic_checkpoint(root / name, tiny_config(**sizes), seed=3)
    return {name: root / name for name in SIZES}


def expert_of_rank(held: dict[str, Tensor], expert: int, hidden: int, stack: str = "mlp_op") -> dict[str, Tensor]:
    """float32 [output, input] of a rank's part of an expert, read value by value from its tiles."""
    root = f"layers.{LAYER}.mlp.expert_mlps.{stack}"
    tiles = held[f"{root}.gate_up_proj.weight"][expert].to(torch.float32)
    partitions, blocks, double = tiles.shape
    assert (partitions, partitions * blocks) == (128, hidden)
    columns = torch.arange(hidden)
    both = tiles[columns % 128, columns // 128].T.contiguous()
    down = held[f"{root}.down_proj.weight"][expert].to(torch.float32).T
    if (scales := held.get(f"{root}.gate_up_proj.scale")) is not None:
        width = double // 2
        for half, rows in enumerate((slice(0, width), slice(width, double))):
            both[rows] *= scales[expert, half].repeat_interleave(128)
        down *= held[f"{root}.down_proj.scale"][expert, 0].repeat_interleave(128)[:, None]
    gate, up = both.chunk(2)
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


CASES = [("tiny", *cut, experts) for cut in ((2, 1), (4, 1), (2, 2)) for experts in ("tiles", "bf16_tiles")]
CASES += [("wide", 64, 1, "tiles"), ("wide", 32, 2, "tiles")]


@pytest.mark.parametrize(("size", "tp", "ep", "experts"), CASES)
def test_every_value_is_the_checkpoints(
    sources: dict[str, Path], tmp_path: Path, size: str, tp: int, ep: int, experts: str
) -> None:
    config = KimiK2Config.from_pretrained(sources[size])
    manifest = Presharder(sources[size], tmp_path, Layout(tp, ep, experts=experts)).run()
    assert len(list(verify(tmp_path))) == tp * ep
    ranks = [load_file(tmp_path / "weights" / rank_file_name(rank)) for rank in range(tp * ep)]
    local, width = config.n_routed_experts // ep, config.moe_intermediate_size // tp
    changed = 0
    with CheckpointReader.for_config(sources[size], config) as reader:
        gate = reader.get(f"model.layers.{LAYER}.mlp.gate.weight").to(torch.bfloat16)
        for expert in range(config.n_routed_experts):
            plain, odd = {}, {}
            for name in ("gate_proj", "up_proj", "down_proj"):
                stored = f"model.layers.{LAYER}.mlp.experts.{expert}.{name}.weight"
                codes, scale = reader.get(stored), reader.get(f"{stored}_scale_inv")
                plain[name] = dequantize_fp8_block(codes, scale, dtype=torch.float32)
                bits = codes.view(torch.uint8).to(torch.int32)
                # The least codes with an odd last bit are the only ones whose halves are rounded.
                odd[name] = ((bits & 0x7F) < 2 * EXACT) & (bits % 2 == 1)
                changed += int(odd[name].sum())
            for part in range(tp):
                found = expert_of_rank(ranks[expert // local * tp + part], expert % local, config.hidden_size)
                mine = slice(part * width, (part + 1) * width)
                for name, values in found.items():
                    cut = (slice(None), mine) if name == "down_proj" else (mine,)
                    expected, rounded = plain[name][cut], odd[name][cut]
                    if experts == "bf16_tiles":
                        assert torch.equal(values, expected.to(torch.bfloat16).to(torch.float32))
                        continue
                    assert torch.equal(values[~rounded], expected[~rounded])
                    least = float(plain[name].abs().max()) / 2**7
                    assert float((values - expected)[rounded].abs().max() if rounded.any() else 0) < least
    for held in ranks:
        assert torch.equal(held[f"layers.{LAYER}.mlp.router.linear_router.weight"], gate.T)
    if experts == "tiles":
        layers = manifest["errors"]["layers"]
        assert layers[str(LAYER)]["changed"] == changed
        assert manifest["errors"]["total"]["relative_l2"] < 1e-4


@pytest.mark.parametrize(
    ("size", "tp", "ep", "experts"),
    [("tiny", 2, 2, "tiles"), ("tiny", 4, 1, "bf16_tiles"), ("wide", 64, 1, "tiles"), ("wide", 32, 2, "tiles")],
)
def test_the_shared_expert_is_divided_among_all_ranks(
    sources: dict[str, Path], tmp_path: Path, size: str, tp: int, ep: int, experts: str
) -> None:
    config = KimiK2Config.from_pretrained(sources[size])
    layout = Layout(tp, ep, experts=experts)
    Presharder(sources[size], tmp_path, layout).run()
    ranks = [load_file(tmp_path / "weights" / rank_file_name(rank)) for rank in range(tp * ep)]
    width = config.moe_intermediate_size // layout.ranks
    with CheckpointReader.for_config(sources[size], config) as reader:
        for name in ("gate_proj", "up_proj", "down_proj"):
            stored = f"model.layers.{LAYER}.mlp.shared_experts.{name}.weight"
            codes, scale = reader.get(stored), reader.get(f"{stored}_scale_inv")
            plain = dequantize_fp8_block(codes, scale, dtype=torch.float32)
            for rank, held in enumerate(ranks):
                mine = slice(rank * width, (rank + 1) * width)
                cut = (slice(None), mine) if name == "down_proj" else (mine,)
                found = expert_of_rank(held, 0, config.hidden_size, "shared_experts")[name]
                if experts == "bf16_tiles":
                    assert torch.equal(found, plain[cut].to(torch.bfloat16).to(torch.float32))
                    continue
                # Halves of the least codes are rounded; all others are exact.
                bits = codes.view(torch.uint8).to(torch.int32)[cut]
                rounded = ((bits & 0x7F) < 2 * EXACT) & (bits % 2 == 1)
                assert torch.equal(found[~rounded], plain[cut][~rounded])
                assert float((found - plain[cut]).abs().max()) < float(plain.abs().max()) / 2**7


def test_a_shared_expert_without_fp8_blocks_stays_what_it_is(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """INT4 checkpoints store it in BF16: FP8 would round it. Tiles of it have no scales."""
    Presharder(checkpoints["thinking"], tmp_path, Layout(2, 2, experts="tiles")).run()
    held = load_file(tmp_path / "weights" / rank_file_name(0))
    root = f"layers.{LAYER}.mlp.expert_mlps.shared_experts"
    shared = {name: tensor for name, tensor in held.items() if name.startswith(root)}
    assert set(shared) == {f"{root}.{one}.weight" for one in ("gate_up_proj", "down_proj")}
    assert {tensor.dtype for tensor in shared.values()} == {torch.bfloat16}
    with safe_open(next(checkpoints["thinking"].glob("*.safetensors")), "pt") as file:
        down = file.get_tensor(f"model.layers.{LAYER}.mlp.shared_experts.down_proj.weight")
    found = shared[f"{root}.down_proj.weight"][0]  # the rank's columns of it, transposed
    assert torch.equal(found.T, down[:, : len(found)])


def test_a_rank_reads_long_runs() -> None:
    """At the real sizes a partition's run of a chosen expert is thousands of bytes, in place of 32 or 64."""
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    for layout, width in ((Layout(64, experts="tiles"), 32), (Layout(32, 2, experts="tiles"), 64)):
        held = {tensor.name: tensor for tensor in make_plan(config, layout).tensors}
        root = "layers.1.mlp.expert_mlps.mlp_op"
        local = config.n_routed_experts // layout.moe_ep
        assert held[f"{root}.gate_up_proj.weight"].local_shape == (local, 128, 56, 2 * width)
        assert held[f"{root}.gate_up_proj.scale"].local_shape == (local, 2, 56)
        assert held[f"{root}.down_proj.weight"].local_shape == (local, width, 7168)
        assert held[f"{root}.down_proj.scale"].local_shape == (local, 1, 56)
        assert math.prod(held[f"{root}.gate_up_proj.weight"].local_shape[2:]) >= 3584


@pytest.mark.parametrize("source", ["bf16", "thinking"])
def test_what_is_not_stored_in_blocks_is_quantized(checkpoints: dict[str, Path], tmp_path: Path, source: str) -> None:
    manifest = Presharder(checkpoints[source], tmp_path, Layout(2, 2, experts="tiles")).run()
    assert 0 < manifest["errors"]["total"]["relative_l2"] < 0.03


def test_an_interrupted_conversion_goes_on(sources: dict[str, Path], tmp_path: Path) -> None:
    layout = Layout(2, 2, experts="tiles")
    Presharder(sources["tiny"], tmp_path / "whole", layout).run()

    def stop(layer: int, _: object) -> None:
        if layer == LAYER:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Presharder(sources["tiny"], tmp_path / "broken", layout, on_layer=stop).run()
    Presharder(sources["tiny"], tmp_path / "broken", layout).run()
    for rank in range(4):
        name = f"weights/{rank_file_name(rank)}"
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_widths_and_sizes_that_the_kernel_does_not_take_are_refused() -> None:
    for experts in ("tiles", "bf16_tiles"):
        with pytest.raises(ConfigError, match=r"moe_intermediate_size.*got 128 with 1 ranks"):
            make_plan(tiny_config(), Layout(1, experts=experts))
        with pytest.raises(ConfigError, match=r"hidden_size.*got 192"):
            make_plan(tiny_config(hidden_size=192), Layout(2, experts=experts))
