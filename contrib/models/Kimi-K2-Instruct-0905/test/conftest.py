"""A tiny checkpoint for the tests that need one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint directories by name."""
    directory = tmp_path_factory.mktemp("checkpoints") / "bf16"
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2-instruct-0905"), "bf16"), seed=1)
    return {"bf16": directory}
