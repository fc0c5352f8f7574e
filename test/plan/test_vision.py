"""The tower's counts against torch's own counter, and its bytes against a checkpoint's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.plan.deployment import load_target
from kimi_k2.plan.memory import TOWER, memory_plan
from kimi_k2.plan.vision import image_cost, tower_bytes, vision_report
from kimi_k2.vision_config import Grid


@pytest.mark.parametrize("grid", [Grid(1, 8, 12), Grid(4, 6, 4)])
def test_operations_are_torchs(k25_int4: Path, grid: Grid) -> None:
    model = VisionModel.from_pretrained(k25_int4)
    pixels = torch.zeros(grid.patches, 3, 14, 14)
    # The counter knows the two products of attention, not the CPU's fused one.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(pixels, [grid])
    config = KimiK2Config.from_pretrained(k25_int4)
    cost = image_cost(config, grid)
    vision = config.vision
    assert vision is not None
    height, width = vision.pos_emb_height, vision.pos_emb_width
    resampling = 2 * vision.hidden_size * (grid.height * height * width + grid.height * grid.width * width)
    assert cost.flops + resampling == counter.get_total_flops()
    assert cost.tokens == len(model(pixels, [grid]))


def test_bytes_are_the_checkpoints(k25_int4: Path) -> None:
    config = KimiK2Config.from_pretrained(k25_int4)
    whole = CheckpointReader.for_config(k25_int4, config, vision=True).total_bytes
    text = CheckpointReader.for_config(k25_int4, config).total_bytes
    assert tower_bytes(config) == whole - text


def test_published_sizes() -> None:
    report = vision_report(KimiK2Config.from_preset("kimi-k2.5"), 10**10)
    assert report is not None
    assert report["weights"] == 2 * 471_143_920
    assert [image["tokens"] for image in report["images"]] == [256, 1024, 4096, 1024]
    assert [image["pixels"] for image in report["images"]] == [[side, side] for side in (448, 896, 1792, 896)]
    assert vision_report(KimiK2Config.from_preset("kimi-k2-thinking"), 0) is None


def test_a_rank_holds_the_tower_beside_the_language_model() -> None:
    k25, text = (KimiK2Config.from_preset(name) for name in ("kimi-k2.5", "kimi-k2-thinking"))
    for preset, ranks in (("h200-tp8", 1), ("trn2-tp64-ep1-1k", 16)):
        plan, without = (memory_plan(load_target(preset, config)) for config in (k25, text))
        assert TOWER not in without.parts
        held = plan.parts[TOWER]
        assert plan.resident - held == without.resident
        # 413 M of 471 M parameters are divided; the learned positions are not on a Trainium core. Counted in the HLO of
        # the graph of 1024 patches in 4 frames (`kimi-k2 compile --hlo-only`), less the inputs of every patch.
        counted = 66_173_334 - 1024 * (2 * 588 + 4 * (1152 + 72 + 2))
        assert held == 2 * 471_143_920 if ranks == 1 else held == pytest.approx(counted, rel=1e-6)
