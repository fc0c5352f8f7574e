"""Decode whose attention is one kernel on weights in tiles, in NxD's CPU mode on the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import LINES
from harness import refused_field
from test_nki_kernels import ALL, check_kernels, options
from test_nki_kernels import SIZES as KERNEL_SIZES

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

NAMES = {"attention": "attention_decode"}
WITHOUT = ("DecodeLayersKernel",)
# A rank of two has at most 128 columns of the residual.
SIZES: dict[str, Any] = {
    **KERNEL_SIZES,
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
        write_synthetic_checkpoint(root / fmt, with_format(tiny_config(**SIZES), fmt), seed=5)
    return {fmt: root / fmt for fmt in ("bf16", "fp8")}


@pytest.mark.parametrize(
    ("layout", "cores", "more"),
    [("TP2", 1, {}), ("TP2", 2, {}), ("EP2", 2, {}), ("EP2", 2, LINES)],
    ids=["TP2, one core", "TP2", "EP2", "batching"],
)
def test_layers_one_by_one(
    stored: dict[str, Path], tmp_path: Path, layout: str, cores: int, more: dict[str, Any]
) -> None:
    """Decode of whole layers without its kernel: each layer's attention is a kernel, as the dense one's is."""
    case: dict[str, Any] = {"arrival": [2, 0, 3, 1]} if more else {}
    given = options(layout, cores, decode="layers", **more)
    check_kernels(stored["bf16"], given, tmp_path, ALL, names=NAMES, without=WITHOUT, **case)


@pytest.mark.parametrize(("field", "sizes"), [("v_head_dim", {"v_head_dim": 64}), ("q_lora_rank", {"q_lora_rank": 96})])
def test_sizes_that_tiles_do_not_take_are_refused(field: str, sizes: dict[str, int]) -> None:
    assert refused_field(options("TP2", 2, decode="layers"), tiny_config(**{**SIZES, **sizes})) == field
