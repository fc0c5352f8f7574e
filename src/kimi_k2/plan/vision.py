"""The vision tower in a plan: weights, and by image size the tokens, operations and activations. Modelled."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from math import gcd

from rich.console import Console
from rich.table import Table

from kimi_k2.checkpoint.names import vision_tensors
from kimi_k2.config import KimiK2Config
from kimi_k2.files import Json
from kimi_k2.vision_config import Grid

_BF16 = 2
_DIVIDED = re.compile(r"\.(wqkv|fc0|proj\.0)\.|\.(wo|fc1|proj\.2)\.weight$")
# Sides in pixels that the report lists, and the largest image that the processor makes.
SIDES = (448, 896, 1792)


@dataclass(frozen=True)
class ImageCost:
    """One image, or one chunk of a video.

    Attributes:
        grid: of its patches.
        tokens: that it takes in the prompt, begin and end left out.
        flops: of tower and projector; a multiply-add is two. Resampling the learned positions, under a thousandth of
            them at real sizes, is left out: a deployment may do it once for each grid.
        activations: bytes at the peak on a GPU, in BF16, inside the attention or the feed-forward of a layer.
    """

    grid: Grid
    tokens: int
    flops: int
    activations: int


def tower_bytes(config: KimiK2Config) -> int:
    """Weights of tower and projector, which every rank that encodes images holds whole; 0 without a tower."""
    return sum(spec.nbytes for spec in vision_tensors(config))


def tower_ranks(config: KimiK2Config, ranks: int) -> int:
    """Ranks of Trainium that share the tower: as many as divide its heads, feed-forward and projector."""
    vision = config.vision
    assert vision is not None
    return gcd(ranks, vision.num_attention_heads, vision.intermediate_size, vision.merged_size)


def tower_rank_bytes(config: KimiK2Config, ranks: int, neuron: bool) -> int:
    """What one rank holds of tower and projector; 0 without a tower.

    A GPU holds them whole. On Trainium `tower_ranks` share heads, feed-forward and projector; norms, the patches'
    embedding and the biases after a sum are every rank's, and the learned positions stay on the host.
    """
    if config.vision is None or not neuron:
        return tower_bytes(config)
    ranks = tower_ranks(config, ranks)
    held = (spec for spec in vision_tensors(config) if "pos_emb" not in spec.name)
    return sum(spec.nbytes // (ranks if _DIVIDED.search(spec.name) else 1) for spec in held)


def image_cost(config: KimiK2Config, grid: Grid) -> ImageCost:
    """Counts from the shapes alone.

    Raises:
        MediaError: the tower takes no such grid.
    """
    vision = config.vision
    assert vision is not None
    vision.check_grid(grid)
    width, pixels = vision.hidden_size, 3 * vision.patch_size**2
    # The embedded patches, the residual stream and its last summand, the two after the norm; queries, keys and values
    # as they come and as the kernel reads them, and its result; or what is between the two linears, and the result.
    alive = max((5 + 3 + 3 + 1) * width, (5 + 1) * width + vision.intermediate_size)
    flops = tower_rank_flops(config, grid.patches, grid.frames, 1)
    activations = grid.patches * (alive * _BF16 + pixels * (1 + _BF16))  # pixels as bytes and as BF16
    return ImageCost(grid, grid.tokens(vision.merge_kernel_size), flops, activations)


def tower_rank_flops(config: KimiK2Config, patches: int, frames: int, ranks: int) -> int:
    """Of one compiled graph on one of `ranks`, which share all but the patches' embedding."""
    vision = config.vision
    assert vision is not None
    width, merged = vision.hidden_size, vision.merged_size
    tokens = patches // (frames * merged // width)
    # A layer's four projections of the attention and feed-forward, and the attention's two products.
    weights = 4 * width**2 + 2 * width * vision.intermediate_size
    shared = vision.num_hidden_layers * (2 * patches * weights + 4 * patches**2 * width)
    shared += 2 * tokens * merged * (merged + config.hidden_size)
    return shared // ranks + 2 * patches * width * 3 * vision.patch_size**2


def vision_report(config: KimiK2Config, room: int) -> Json | None:
    """What a plan says of images; None for a member without a tower.

    Args:
        room: bytes that a rank has left beside the language model.
    """
    if config.vision is None:
        return None
    patch = config.vision.patch_size
    grids = [Grid(1, side // patch, side // patch) for side in SIDES] + [Grid(4, 64, 64)]
    costs = [image_cost(config, grid) for grid in grids]
    return {
        "weights": tower_bytes(config),
        "room_beside_tower": room - tower_bytes(config),
        "images": [
            {
                **asdict(cost),
                "grid": list(cost.grid),
                "pixels": [cost.grid.height * patch, cost.grid.width * patch],
            }
            for cost in costs
        ],
    }


def print_vision(report: Json, console: Console) -> None:
    """The report as a table."""
    title = f"images: the tower's weights take {report['weights'] / 1e9:.3f} GB of each rank that encodes them"
    table = Table("frames, pixels", "tokens", "TFLOP", "activations, GB", title=title)
    for image in report["images"]:
        height, width = image["pixels"]
        size = f"{image['grid'][0]} x {height} x {width}"
        table.add_row(size, f"{image['tokens']:,}", f"{image['flops'] / 1e12:.2f}", f"{image['activations'] / 1e9:.3f}")
    console.print(table)
    if report["room_beside_tower"] < 0:
        console.print("no room for the tower beside the language model", style="bold red")
