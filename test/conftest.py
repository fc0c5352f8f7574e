"""Fixtures shared by all tests: tiny checkpoints in every published format, written once a test run and worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_k2.checkpoint.synthetic import tiny_config, with_format, write_synthetic_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint directories by name: K2 in FP8 and BF16, Thinking in INT4, K2.5 (prefixed names) in INT4."""
    root = tmp_path_factory.mktemp("checkpoints")
    configs = {
        "fp8": tiny_config("kimi-k2-instruct-0905"),
        "bf16": with_format(tiny_config("kimi-k2-instruct"), "bf16"),
        "thinking": tiny_config("kimi-k2-thinking"),
        "k2.5": tiny_config("kimi-k2.5"),
    }
    for seed, (name, config) in enumerate(configs.items()):
        write_synthetic_checkpoint(root / name, config, seed=seed)
    return {name: root / name for name in configs}
