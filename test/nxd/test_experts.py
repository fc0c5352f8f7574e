"""Quantized experts, dropless prefill and selective loading under expert parallelism on real NxD source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import LAYOUTS, check, expected_logits, launch, neuron_config, plain_model, sequences
from safetensors.torch import load_file, save_file
from stored_experts import whole_state

from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.experts.blockwise import BlockwiseExperts
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

RELATIVE = 2e-3
SPLITS = ("TP2", "EP2", "TP2xEP2")


def formats(layout: str) -> dict[str, Any]:
    """Expert formats for a layout of the tiny model."""
    tp, ep = LAYOUTS[layout]
    known = expert_formats()
    return {name: known[name].for_layout(tiny_config(), Layout(tp, ep)) for name in ("blockwise", "per_channel")}


def requantized(directory: Path, experts: Any) -> Any:
    """The plain model with each expert's weight replaced by what the Neuron state dict holds, dequantized."""
    model = plain_model(directory)
    modules = whole_state(directory, experts, torch.float32)
    for layer, block in enumerate(model.model.layers):
        if not hasattr(block.mlp, "experts"):
            continue
        for name in ("gate_up_proj", "down_proj"):
            stored = f"layers.{layer}.mlp.experts.{name}"
            weight = modules[f"{stored}.weight"].float()
            scale = modules[f"{stored}.scale"]
            for dim in (1, 2):
                scale = scale.repeat_interleave(weight.shape[dim] // scale.shape[dim], dim)
            getattr(block.mlp.experts, name).copy_((weight * scale).mT)
    return model


@pytest.mark.parametrize("name", ["blockwise", "per_channel"])
@pytest.mark.parametrize("layout", SPLITS)
def test_fp8_experts(checkpoints: dict[str, Path], tmp_path: Path, layout: str, name: str) -> None:
    directory = checkpoints["fp8"]
    experts = formats(layout)[name]
    tp, ep = LAYOUTS[layout]
    case = sequences(4, 512)
    options = neuron_config(tp, ep, 4, **experts.neuron_options())
    (logits,) = launch({"checkpoint": directory, "neuron_config": options, "cases": [case]}, tmp_path)["logits"]
    assert bool(logits.isfinite().all())
    # Blockwise codes are the checkpoint's own; per-channel ones are requantized, so the weights compared are theirs.
    model = plain_model(directory) if name == "blockwise" else requantized(directory, experts)
    expected = expected_logits(model, case)
    relative = float((logits - expected).norm() / expected.norm())
    print(f"\n{name} {layout}: relative L2 difference {relative:.1e}")
    assert relative <= RELATIVE


@pytest.mark.parametrize("name", ["blockwise", "per_channel"])
def test_no_code_that_trainium_reads_as_nan(checkpoints: dict[str, Path], name: str) -> None:
    """Exponent bits all ones: 0x78 to 0x7F without the sign."""

    def reserved(weight: torch.Tensor) -> int:
        return int(((weight.view(torch.uint8) & 0x78) == 0x78).sum())

    directory = checkpoints["fp8"]
    source = [t for path in directory.glob("*.safetensors") for t in load_file(path).values()]
    assert sum(reserved(t) for t in source if t.dtype == torch.float8_e4m3fn) > 1000
    experts = formats("TP2")[name]
    state = whole_state(directory, experts, torch.float32)
    held = [t for t in state.values() if t.dtype == torch.float8_e4m3fn]
    assert held
    assert sum(reserved(t) for t in held) == 0


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose router sends every token to experts 0..7."""
    directory = tmp_path_factory.mktemp("crowded")
    config = with_format(tiny_config(num_experts_per_tok=8), "bf16")
    write_synthetic_checkpoint(directory, config, seed=3)
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor[:8] += 10.0
        save_file(tensors, path, {"format": "pt"})
    return directory


@pytest.mark.parametrize("layout", SPLITS)
def test_prefill_of_512_tokens_to_the_same_8_experts_drops_none(crowded: Path, tmp_path: Path, layout: str) -> None:
    tp, ep = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 512, (512,), generator=generator).tolist()
    case = {"prompts": [prompt], "forced": [[1, 2]]}
    options = neuron_config(tp, ep, 1, seq_len=520)
    options["blockwise_matmul_config"]["block_size"] = 128
    (logits,) = launch({"checkpoint": crowded, "neuron_config": options, "cases": [case]}, tmp_path)["logits"]
    model = plain_model(crowded)
    chosen: list[torch.Tensor] = []
    model.get_submodule("model.layers.1.mlp.gate").register_forward_hook(lambda *args: chosen.append(args[2][0]))
    expected = expected_logits(model, case)
    assert set(chosen[0].unique().tolist()) == set(range(8))
    check(f"512 tokens {layout}", logits, expected)


def test_block_scales_stay_whole_where_a_rank_is_narrower_than_a_block(checkpoints: dict[str, Path]) -> None:
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    for ranks, block in ((8, 128), (16, 128), (32, 64), (64, 32)):
        assert BlockwiseExperts.for_layout(config, Layout(ranks)).block == block
