"""Tower and projector against transformers' on the same checkpoint, in float32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rewritten import rewritten

from kimi_k2.errors import ConfigError, MediaError, MissingTensorError
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.parity.reference import transformers_features, transformers_kimi_k25
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format
from kimi_k2.vision_config import Grid

RELATIVE = 1e-5
REAL_SIZE = "KIMI_K2_REAL_TOWER"

# One merged token; smaller, equal and larger than the learned map; long and thin; clips of every length.
SMALL_GRIDS = [
    Grid(1, 2, 2), Grid(1, 10, 10), Grid(1, 4, 26), Grid(1, 32, 2), Grid(1, 2, 512), Grid(1, 18, 22),
    Grid(1, 6, 10), Grid(1, 40, 38), Grid(4, 6, 8), Grid(2, 2, 12), Grid(3, 10, 10), Grid(4, 2, 2),
]  # fmt: skip
# The same for the real map of 64 by 64; 512 patches a side and 16384 in all are the processor's limits.
REAL_GRIDS = [
    Grid(1, 2, 2), Grid(1, 6, 30), Grid(1, 32, 32), Grid(1, 64, 64), Grid(1, 46, 82), Grid(1, 2, 512),
    Grid(1, 512, 2), Grid(4, 2, 2), Grid(2, 8, 10), Grid(3, 14, 6), Grid(4, 32, 32), Grid(1, 128, 128),
]  # fmt: skip


def pixels_of(grids: list[Grid], patch: int = 14) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(grids))
    return torch.rand(sum(grid.patches for grid in grids), 3, patch, patch, generator=generator) * 2 - 1


def compare(directory: Path, reference: Any, grids: list[Grid], *, packed: bool) -> None:
    model = VisionModel.from_pretrained(directory)
    pixels = pixels_of(grids)
    images = pixels.split([grid.patches for grid in grids])
    together = model(pixels, grids).split([grid.tokens() for grid in grids]) if packed else None
    for number, (grid, image) in enumerate(zip(grids, images, strict=True)):
        ours = together[number] if together else model(image, [grid])
        theirs = transformers_features(reference, image, [grid])[0]
        assert ours.shape == theirs.shape == (grid.tokens(), model.mm_projector.proj[2].out_features)
        relative = float((ours - theirs).norm() / theirs.norm())
        worst = float((ours - theirs).abs().max() / theirs.abs().max())
        print(f"{tuple(grid)}: relative L2 {relative:.2e}, largest error over largest value {worst:.2e}", flush=True)
        assert max(relative, worst) <= RELATIVE


def test_twelve_grids_packed_in_one_sequence(k25: Path, reference: Any) -> None:
    compare(k25, reference, SMALL_GRIDS, packed=True)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("real") / "k2.5"
    config = with_format(tiny_config("kimi-k2.5", vision={}, hidden_size=7168, num_hidden_layers=2), "bf16")
    write_synthetic_checkpoint(directory, config, seed=6)
    return directory, transformers_kimi_k25(directory)


@pytest.mark.skipif(REAL_SIZE not in os.environ, reason=f"takes an hour; {REAL_SIZE}=1 runs it")
@pytest.mark.parametrize("grid", REAL_GRIDS, ids=lambda grid: "x".join(map(str, grid)))
def test_twelve_grids_at_the_real_size(real: tuple[Path, Any], grid: Grid) -> None:
    compare(*real, [grid], packed=False)


def test_pixels_must_fit_the_grids(k25: Path) -> None:
    model = VisionModel.from_pretrained(k25)
    pixels = pixels_of([Grid(1, 4, 4)])
    for grids in ([], [Grid(1, 4, 6)], [Grid(1, 3, 4)], [Grid(5, 2, 2)], [Grid(0, 2, 2)], [Grid(1, 0, 4)]):
        with pytest.raises(MediaError, match="grid"):
            model(pixels, grids)
    with pytest.raises(MediaError, match=r"expected \[16, 3, 14, 14\]"):
        model(pixels[:, :, :13], [Grid(1, 4, 4)])


def test_a_member_without_a_tower_has_none(thinking: Path) -> None:
    with pytest.raises(ConfigError, match="vision_config"):
        VisionModel.from_pretrained(thinking)


def test_a_damaged_tower_is_named_before_its_model_takes_memory(k25: Path, tmp_path: Path) -> None:
    """On a device that no machine has, which the model would not get."""
    name = "mm_projector.pre_norm.weight"
    rewritten(k25, tmp_path / "damaged", lambda held: {key: held[key] for key in held if key != name})
    with pytest.raises(MissingTensorError, match=name):
        VisionModel.from_pretrained(tmp_path / "damaged", device="cuda:99")
    with pytest.raises((AssertionError, RuntimeError)):
        VisionModel.from_pretrained(k25, device="cuda:99")
