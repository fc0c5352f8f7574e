"""Conversion keeps the vision tower: one file beside the ranks', byte for byte, verified, made again if gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kimi_k2.errors import CheckpointError, MissingShardError
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import MANIFEST, VISION_FILE, load_manifest
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import faults


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2, target="cuda", experts="stored")], ids=["neuron", "cuda"])
def test_tower_is_kept_and_verified(checkpoints: dict[str, Path], tmp_path: Path, layout: Layout) -> None:
    stored = {k: v for shard in checkpoints["k2.5"].glob("*.safetensors") for k, v in load_file(shard).items()}
    expected = {name: tensor for name, tensor in stored.items() if not name.startswith("language_model.")}
    done: list[int] = []
    manifest = Presharder(checkpoints["k2.5"], tmp_path, layout, on_bytes=done.append).run()
    assert sum(done) == sum(tensor.nbytes for tensor in stored.values())
    written = load_file(tmp_path / VISION_FILE)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert not list(faults(tmp_path))

    whole = (tmp_path / VISION_FILE).read_bytes()
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    (tmp_path / VISION_FILE).write_bytes(damaged)
    assert [type(fault) for fault in faults(tmp_path)] == [CheckpointError]
    (tmp_path / VISION_FILE).unlink()
    assert [type(fault) for fault in faults(tmp_path)] == [MissingShardError]
    Presharder(checkpoints["k2.5"], tmp_path, layout).run()
    assert (tmp_path / VISION_FILE).read_bytes() == whole
    assert load_manifest(tmp_path) == manifest


def test_models_without_a_tower_have_no_such_file(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    assert "vision" not in Presharder(checkpoints["thinking"], tmp_path, Layout(1)).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST, "weights"]
