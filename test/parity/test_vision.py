"""Points of the vision tower against transformers', and faults that are put down to the module that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import kimi

from kimi_k2.errors import KimiK2Error
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.parity.reference import MissingLibraryError, transformers_kimi_k25
from kimi_k2.parity.trace import ParityError
from kimi_k2.parity.vision import first_divergence, tower_points, trace_plain, trace_transformers
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format
from kimi_k2.vision_config import Grid

GRIDS = [Grid(1, 4, 6), Grid(1, 2, 2), Grid(3, 2, 4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parity") / "k2.5"
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2.5"), "bf16"), seed=7)
    return directory


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> dict[str, torch.Tensor]:
    try:
        reference: Any = transformers_kimi_k25(checkpoint)
    except MissingLibraryError as error:
        pytest.skip(str(error))
    return trace_transformers(reference, pixels(), GRIDS)


def pixels() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(sum(grid.patches for grid in GRIDS), 3, 14, 14, generator=generator) * 2 - 1


def test_every_point_is_transformers(checkpoint: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = trace_plain(VisionModel.from_pretrained(checkpoint), pixels(), GRIDS)
    assert list(found) == list(wanted) == list(tower_points(2))
    assert len(found) == 1 + 2 * 5 + 3
    assert first_divergence(found, wanted) is None


@pytest.mark.parametrize(
    ("parameter", "point"),
    [
        ("vision_tower.patch_embed.pos_emb.weight", "patch_embed"),
        ("vision_tower.patch_embed.proj.bias", "patch_embed"),
        ("vision_tower.encoder.blocks.0.norm0.weight", "blocks.0.norm0"),
        ("vision_tower.encoder.blocks.1.wqkv.bias", "blocks.1.wo"),
        ("vision_tower.encoder.blocks.1.mlp.fc0.weight", "blocks.1.mlp"),
        ("vision_tower.encoder.final_layernorm.bias", "final_layernorm"),
        ("mm_projector.pre_norm.weight", "pre_norm"),
        ("mm_projector.proj.2.weight", "mm_projector"),
    ],
)
def test_a_fault_is_named(checkpoint: Path, wanted: dict[str, torch.Tensor], parameter: str, point: str) -> None:
    model = VisionModel.from_pretrained(checkpoint)
    model.get_parameter(parameter).mul_(1.1)
    found = first_divergence(trace_plain(model, pixels(), GRIDS), wanted)
    assert found is not None and found.point == point


def test_the_command(tmp_path: Path) -> None:
    """Of a quantized checkpoint as published: INT4 experts, which transformers' class does not take."""
    pytest.importorskip("transformers.models.kimi_k25")
    write_synthetic_checkpoint(tmp_path, tiny_config("kimi-k2.5"), seed=7)
    words = "parity", "tower", tmp_path
    assert "14 points" in kimi(*words, "--grid", "4x6", "--grid", "2x2x4").output
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kimi_k2.cli.commands.parity._TOWER", 1e-12)
        assert "patch_embed" in kimi(*words, "--grid", "2x2", status=1).output
    for bad, message in (("4", "HEIGHTxWIDTH"), ("4x-6", "HEIGHTxWIDTH"), ("3x4", "multiples"), ("9x4x4", "frames")):
        refused = kimi(*words, "--grid", bad, status=None)
        assert isinstance(refused.exception, KimiK2Error) and message in str(refused.exception)


def test_traces_that_cannot_be_compared() -> None:
    trace = {"patch_embed": torch.ones(2, 3)}
    with pytest.raises(ParityError, match="patch_embed"):
        first_divergence({"patch_embed": torch.ones(3, 3)}, trace)
    assert first_divergence({"patch_embed": torch.full((2, 3), float("nan"))}, trace) is not None
