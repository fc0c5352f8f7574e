"""Cases of the vision tower in BF16, packs of images of one size, beside transformers' tower and projector."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kimi_k2.bench.kernels.harness import Case, event_times
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.vision import PACK_PATCHES, packed, run_pack
from kimi_k2.media.patches import Media
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.plan.vision import image_cost, tower_bytes
from kimi_k2.vision_config import Grid

SIDES = (448, 896, 1792)
ATTENTIONS = ("flash_attention_2", "sdpa")


def random_model(dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> VisionModel:
    """The published tower and projector with small random weights."""
    with torch.device("meta"):
        model = VisionModel(KimiK2Config.from_preset("kimi-k2.5"), dtype=dtype)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    return model.eval()


def transformers_model(attention: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any | None:
    """transformers' tower and projector with random weights; None where the attention is not installed."""
    from transformers.models import kimi_k25
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25MultimodalProjection

    text = {"model_type": "deepseek_v3", "hidden_size": 7168}
    config = kimi_k25.Kimi_K25Config(text_config=text)
    try:
        with torch.device(device):
            tower = kimi_k25.Kimi_K25VisionModel._from_config(config.vision_config, attn_implementation=attention)
            projector = Kimi_K25MultimodalProjection(config)
    except (ImportError, ValueError):
        return None
    tower, projector = tower.to(device, dtype).eval(), projector.to(device, dtype).eval()

    def run(pixels: Tensor, grids: Tensor) -> Tensor:
        return projector(tower(pixels, grid_thw=grids).pooler_output)

    return run


@torch.inference_mode()
def _in_packs(model: VisionModel, packs: list[list[Media]]) -> None:
    for pack in packs:
        run_pack(model, pack)


@torch.inference_mode()
def _in_parts(model: Any, pixels: Tensor, grids: Tensor, size: int) -> None:
    for part in pixels.split(size):
        model(part.flatten(0, 1), grids[: len(part)])


def cases(with_peers: bool) -> Iterator[Case]:
    """Each size: ours in packs, transformers' in one call and in calls of a pack; launched by the host, as served."""
    config, ours = KimiK2Config.from_preset("kimi-k2.5"), random_model()
    names = ATTENTIONS if with_peers else ()
    theirs = {name: model for name in names if (model := transformers_model(name)) is not None}
    for side in SIDES:
        grid = Grid(1, side // 14, side // 14)
        count = 2 * PACK_PATCHES // grid.patches
        pixels = torch.randint(0, 256, (count, grid.patches, 3, 14, 14), dtype=torch.uint8, device="cuda")
        packs = packed([Media(grid, patch) for patch in pixels], PACK_PATCHES)
        ways = {"ours": [partial(_in_packs, ours, packs)]}
        floats, grids = pixels.to(torch.bfloat16) / 127.5 - 1, torch.tensor([list(grid)] * count, device="cuda")
        for (name, model), size in product(theirs.items(), {count, len(packs[0])}):
            ways[f"transformers {name}, {size} at once"] = [partial(_in_parts, model, floats, grids, size)]
        flops, moved = count * image_cost(config, grid).flops, tower_bytes(config) + pixels.nbytes
        yield Case(
            "vision", f"{count} of {side} pixels", ways, moved, flops, lambda calls: event_times(calls[0], 15, 5)
        )
