"""Decode whose attention is one kernel on weights in tiles, in NxD's CPU mode on the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import SLOW, expected_logits, launch, plain_model, sequences
from test_nki_kernels import ALL, BATCHING, SIZES, TOLERANCE, check, options

from kimi_k2.errors import ConfigError
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

FAULTS = Path(__file__).with_name("attention_tiles_faults.py")
NAMES = {"attention": "attention_decode"}
WITHOUT = ("DecodeLayersKernel",)
# A rank of two has at most 128 columns of the residual.
HEADS: dict[str, Any] = {
    "n_routed_experts": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "qk_rope_head_dim": 32,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in BF16 and in FP8 blocks, of heads that the kernel takes."""
    root = tmp_path_factory.mktemp("attention")
    for fmt in ("bf16", "fp8"):
        write_synthetic_checkpoint(root / fmt, with_format(tiny_config(**{**SIZES, **HEADS}), fmt), seed=5)
    return {fmt: root / fmt for fmt in ("bf16", "fp8")}


@pytest.mark.parametrize(
    ("layout", "cores", "more"),
    [("TP2", 1, {}), ("TP2", 2, {}), ("EP2", 2, {}), ("EP2", 2, BATCHING)],
    ids=["TP2, one core", "TP2", "EP2", "batching"],
)
def test_layers_one_by_one(
    stored: dict[str, Path], tmp_path: Path, layout: str, cores: int, more: dict[str, Any]
) -> None:
    """Decode of whole layers without its kernel: each layer's attention is a kernel, as the dense one's is."""
    case: dict[str, Any] = {"arrival": [2, 0, 3, 1]} if more else {}
    given = options(layout, cores, decode="layers", **more)
    check(stored["bf16"], given, tmp_path, ALL, names=NAMES, without=WITHOUT, **case)


@SLOW
def test_each_fault_is_seen(stored: dict[str, Path], tmp_path: Path) -> None:
    case = sequences(1, 512, steps=3)
    torch.save(expected_logits(plain_model(stored["bf16"]), case), tmp_path / "expected.pt")
    given = {**options("TP2", 1, decode="layers"), "batch_size": 1}
    job = {"checkpoint": stored["bf16"], "neuron_config": given, "cases": [case], "without": WITHOUT}
    found = launch({**job, "expected": str(tmp_path / "expected.pt")}, tmp_path, FAULTS, 1500)
    for name, far in found.items():
        print(f"\n{name}: {far:.1e}")
    assert found.pop("none") < TOLERANCE
    assert len(found) >= 10
    assert {name: far for name, far in found.items() if not far > TOLERANCE} == {}


@pytest.mark.parametrize(("field", "sizes"), [("v_head_dim", {"v_head_dim": 64}), ("q_lora_rank", {"q_lora_rank": 96})])
def test_sizes_that_tiles_do_not_take_are_refused(field: str, sizes: dict[str, int]) -> None:
    config_module: Any = environment.contrib("config")
    given = options("TP2", 2, decode="layers")
    neuron = config_module.KimiK2NeuronConfig(on_cpu=True, torch_dtype=torch.float32, **given)
    model = config_module.load_kimi_config(tiny_config(**{**SIZES, **HEADS, **sizes}))
    with pytest.raises(ConfigError) as caught:
        config_module.KimiK2InferenceConfig(neuron, load_config=model)
    assert caught.value.field == field
