"""Checkpoints of a dense and an MoE layer, and the line's modules in all tests."""

from __future__ import annotations

from pathlib import Path

import line
import pytest

from kimi_k2.plan import torch_native as cut
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As those of all tests, with two layers: a graph takes seconds to capture."""
    root = tmp_path_factory.mktemp("two_layers")
    configs = {
        "fp8": tiny_config("kimi-k2-instruct-0905", num_hidden_layers=2),
        "bf16": with_format(tiny_config("kimi-k2-instruct", num_hidden_layers=2), "bf16"),
        "modelopt": with_format(tiny_config("kimi-k2-instruct", num_hidden_layers=2), "modelopt-fp8"),
        "thinking": tiny_config("kimi-k2-thinking", num_hidden_layers=2),
        "k2.5": tiny_config("kimi-k2.5", num_hidden_layers=2),
    }
    for seed, (name, config) in enumerate(configs.items()):
        write_synthetic_checkpoint(root / name, config, seed=seed)
    return {name: root / name for name in configs}


@pytest.fixture(autouse=True)
def _line(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.path.stem not in ("test_plugin", "test_in_vllm"):
        line.put(monkeypatch, line.stand_ins())


@pytest.fixture
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few tokens pass their experts in blocks, several a time, as those of thousands do."""
    monkeypatch.setattr(cut, "BLOCK", 4)
    monkeypatch.setattr(cut, "COLUMNS", 1024)
