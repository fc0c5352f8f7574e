"""Points inside the vision tower, so that a difference is put down to the first module that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kimi_k2.model.vision.model import VisionModel
from kimi_k2.model.vision.tower import EncoderBlock
from kimi_k2.parity.compare import PointError, point_error
from kimi_k2.parity.reference import transformers_features
from kimi_k2.parity.trace import ParityError
from kimi_k2.vision_config import Grid

# Points of a block in the order of computation: ours, and transformers' modules that give the same.
BLOCK_POINTS = {"norm0": "norm1", "wo": "attn", "norm1": "norm2", "mlp": "mlp", "": ""}


def parse_grid(text: str) -> Grid:
    """`4x6` or `3x4x6` (frames first) as a grid.

    Raises:
        ParityError: it is neither.
    """
    words = text.split("x")
    if len(words) not in (2, 3) or not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise ParityError(f"grid {text!r}: expected HEIGHTxWIDTH or FRAMESxHEIGHTxWIDTH in patches, such as 4x6")
    return Grid(*map(int, words)) if len(words) == 3 else Grid(1, *map(int, words))


def tower_points(layers: int) -> dict[str, tuple[str, str]]:
    """Every point in the order of computation, with the module that gives it here and in transformers."""
    points = {"patch_embed": ("vision_tower.patch_embed", "vision_tower.patch_embed")}
    for layer in range(layers):
        ours, theirs = f"vision_tower.encoder.blocks.{layer}", f"vision_tower.layers.{layer}"
        for point, module in BLOCK_POINTS.items():
            name = f"blocks.{layer}.{point or 'output'}"
            points[name] = (f"{ours}.{point}".rstrip("."), f"{theirs}.{module}".rstrip("."))
    points["final_layernorm"] = ("vision_tower.encoder.final_layernorm", "vision_tower.final_layernorm")
    points["pre_norm"] = ("mm_projector.pre_norm", "mm_projector.pre_norm")
    points["mm_projector"] = ("mm_projector", "mm_projector")
    return points


def trace_plain(model: VisionModel, pixels: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
    """Every point of the plain tower, [rows, width] in float32 on the CPU, for images one by one."""
    modules = {point: ours for point, (ours, _) in tower_points(model.config.num_hidden_layers).items()}
    with _kept(model, modules) as kept:
        for patches, grid in zip(pixels.split([grid.patches for grid in grids]), grids, strict=True):
            model(patches, [grid])
    return _joined(kept)


def trace_transformers(reference: Any, pixels: Tensor, grids: Sequence[Grid]) -> dict[str, Tensor]:
    """The same of `transformers_kimi_k25` or `transformers_tower`."""
    layers = len(reference.model.vision_tower.layers)
    modules = {point: theirs for point, (_, theirs) in tower_points(layers).items()}
    with _kept(reference.model, modules) as kept:
        transformers_features(reference, pixels, grids)
    return _joined(kept)


def first_divergence(
    actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 1e-5
) -> PointError | None:
    """The first point in `wanted`'s order of which a row's relative L2 exceeds the tolerance; None if there is none.

    Raises:
        ParityError: a point has another shape.
    """
    points = (point_error("tower", name, actual[name], value, (tolerance, 0.0)) for name, value in wanted.items())
    return next((point for point in points if not point.passed), None)


@contextmanager
def _kept(root: nn.Module, modules: Mapping[str, str]) -> Iterator[dict[str, list[Tensor]]]:
    kept: dict[str, list[Tensor]] = {point: [] for point in modules}

    def keep(point: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            value = output
            if isinstance(output, tuple):  # a norm's first result; of our blocks, the residual stream's two summands
                value = output[0] + output[1] if isinstance(module, EncoderBlock) else output[0]
            kept[point].append(value.detach().to("cpu", torch.float32).flatten(0, -2))

        return hook

    with ExitStack() as hooks:
        for point, name in modules.items():
            hooks.callback(root.get_submodule(name).register_forward_hook(keep(point)).remove)
        yield kept


def _joined(kept: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {point: torch.cat(values) for point, values in kept.items()}
