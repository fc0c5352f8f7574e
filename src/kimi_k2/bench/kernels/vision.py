"""Images a second of the vision tower, beside transformers' in the same run.

`python -m kimi_k2.bench.kernels.vision` on a GPU; `--json` for a file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from kimi_k2.bench.kernels.harness import event_times
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.vision import PACK_PATCHES, packed, run_pack
from kimi_k2.media.patches import Media
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.terminal import say
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


def images_a_second(count: int, action: Callable[[], object]) -> float:
    """By the median of 15 runs over `count` images."""
    return count / (statistics.median(event_times(action, 15, 5)) * 1e-6)


@torch.inference_mode()
def measure(sides: tuple[int, ...] = SIDES, patches: int = 2 * PACK_PATCHES) -> Iterator[dict[str, Any]]:
    """Images a second at each size: ours in packs, transformers' in one call and in calls of a pack, the better."""
    ours = random_model()
    theirs = {name: model for name in ATTENTIONS if (model := transformers_model(name)) is not None}
    for side in sides:
        grid = Grid(1, side // 14, side // 14)
        count = max(1, patches // grid.patches)
        pixels = torch.randint(0, 256, (count, grid.patches, 3, 14, 14), dtype=torch.uint8, device="cuda")
        packs = packed([Media(grid, patch) for patch in pixels], PACK_PATCHES)

        def in_packs(packs: Any = packs) -> None:
            for pack in packs:
                run_pack(ours, pack)

        row: dict[str, Any] = {"side": side, "images": count, "ours": images_a_second(count, in_packs)}
        floats, grids = pixels.to(torch.bfloat16) / 127.5 - 1, torch.tensor([list(grid)] * count, device="cuda")
        for name, model in theirs.items():

            def in_parts(size: int, model: Any = model, floats: Tensor = floats, grids: Tensor = grids) -> None:
                for part in floats.split(size):
                    model(part.flatten(0, 1), grids[: len(part)])

            row[f"transformers {name}"] = max(
                images_a_second(count, partial(in_parts, size)) for size in {count, len(packs[0])}
            )
        row["ratio"] = row["ours"] / max((row[f"transformers {name}"] for name in theirs), default=float("nan"))
        yield row


def main(
    as_json: Annotated[str | None, typer.Option("--json", help="File to write.")] = None,
    explain: Annotated[bool, typer.Option(help="Print which kernels ran.")] = True,
) -> None:
    """Print a line a size."""
    from kimi_k2.ops import registry

    registry.pin()
    rows = []
    for row in measure():
        rows.append(row)
        say(", ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
                             for name, value in row.items()))  # fmt: skip
    if explain:
        say("\n".join(line for line in registry.explain().splitlines() if "not called" not in line))
    if as_json:
        content = {"device": torch.cuda.get_device_name(), "rows": rows}
        Path(as_json).write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
