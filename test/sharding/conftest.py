"""A checkpoint and its conversion for four ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("safety") / "source"
    write_synthetic_checkpoint(directory, tiny_config(num_hidden_layers=3, n_routed_experts=8), seed=4)
    return directory


@pytest.fixture(scope="session")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "out"
    Presharder(source, directory, Layout(2, 2)).run()
    return directory


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """A private finished conversion, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "finished"))
