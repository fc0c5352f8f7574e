"""Plans of the real model by size, and what is refused; `test_values` has every rank's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.stored import formats
from kimi_k2.sharding.dry_run import dry_run
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.plan import make_plan
from kimi_k2.synthetic.config import tiny_config, with_format

REAL = KimiK2Config.from_preset("kimi-k2-instruct-0905")
LAYOUTS = [
    Layout(64, 1),
    Layout(32, 2, experts="blockwise"),
    Layout(32, 2),
    Layout(4, 2, experts="bf16"),
    Layout(8, 1, "cuda", "stored"),
    Layout(1, 8, "cuda", "stored"),
    Layout(1, 1, "cuda", "bf16"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_real_model_is_covered_and_sized(layout: Layout) -> None:
    plan = make_plan(REAL, layout)
    sizes = dry_run(REAL, layout)
    assert sizes.input_bytes == 1_029_173_249_888
    whole = sum(torch.Size(t.shape).numel() for t in plan.tensors if t.dim is not None)
    assert whole > 1.02e12
    assert sizes.output_bytes >= whole


def test_early_down_projections_take_time_to_fold() -> None:
    """2112 x 7168 by 2048 columns an expert, in 59 layers that have another behind them."""
    plain, early = (dry_run(REAL, Layout(64, experts=experts)) for experts in ("blockwise", "tiles"))
    assert plain.fold_flops == 0
    assert dry_run(tiny_config(), Layout(1)).peak_memory > 300e6  # Python and PyTorch
    assert early.fold_flops == 2 * 2112 * 7168 * 59 * 385 * 2048
    assert early.seconds() > plain.seconds()


TILED = tiny_config(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=128, v_head_dim=128)
LAYERS: dict[str, Any] = {"moe_tp": 2, "experts": "tiles"}


def but(**changed: Any) -> KimiK2Config:
    return TILED.model_copy(update=changed)


REFUSED: list[tuple[KimiK2Config, dict[str, Any], str | None]] = [
    (REAL, {"moe_tp": 3}, "num_attention_heads"),
    (REAL, {"moe_tp": 128}, "num_attention_heads"),
    (REAL, {"moe_tp": 32, "target": "cuda", "experts": "stored"}, None),  # would cut a scale block
    (TILED, LAYERS | {"target": "cuda", "experts": "stored", "decode": "layers"}, "experts"),
    (TILED, LAYERS | {"experts": "blockwise", "decode": "layers"}, "experts"),
    (TILED, LAYERS | {"decode": "kernels"}, "decode"),
    (TILED, LAYERS | {"decode": "xla"}, "experts"),
    (TILED, LAYERS | {"decode": "fast"}, "decode"),
    (TILED, {"moe_tp": 2, "query_group": 2}, "query_group"),
    (TILED, LAYERS | {"query_group": 3}, "query_group"),
    (TILED, LAYERS | {"query_group": 2}, "num_attention_heads"),  # two heads a rank
    # Layers of several formats.
    (
        but(quantization=formats()["fp8"](ignore=("model.layers.1.self_attn.o_proj",))),
        LAYERS | {"moe_tp": 4, "query_group": 2},
        "attention_tiles",
    ),
    # The shared expert has a width that is in no tiles.
    (but(n_shared_experts=3), LAYERS, "decode"),
    *((but(**{name: size}), LAYERS, name) for name in ("qk_nope_head_dim", "v_head_dim") for size in (64, 256)),
    *((TILED, {"moe_tp": 1, "experts": name}, "moe_intermediate_size") for name in ("tiles", "bf16_tiles")),
    *((but(hidden_size=192), {"moe_tp": 2, "experts": name}, "hidden_size") for name in ("tiles", "bf16_tiles")),
]


@pytest.mark.parametrize(("config", "options", "field"), REFUSED)
def test_what_is_refused(config: KimiK2Config, options: dict[str, Any], field: str | None) -> None:
    with pytest.raises(ConfigError, match="cut a scale block" if field is None else str(field)) as caught:
        make_plan(config, Layout(**options))
    assert caught.value.field == field


def test_what_is_not_refused() -> None:
    make_plan(REAL, Layout(1, 64))
    layout = Layout(**LAYERS | {"moe_tp": 4, "query_group": 2})
    plans = [make_plan(config, layout).tensors for config in (TILED, with_format(TILED, "bf16"))]
    found = [{tensor.dtype for tensor in plan if ".tiles." in tensor.name} for plan in plans]
    assert found == [{torch.float8_e4m3fn, torch.float32}, {torch.bfloat16}]
