"""Checkpoints of a dense and an MoE layer, and the line's modules in all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import line
import pytest

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As those of all tests, with two layers: a graph takes seconds to capture."""
    root = tmp_path_factory.mktemp("two_layers")
    configs = {
        "fp8": tiny_config("kimi-k2-instruct-0905", num_hidden_layers=2),
        "bf16": with_format(tiny_config("kimi-k2-instruct", num_hidden_layers=2), "bf16"),
        "thinking": tiny_config("kimi-k2-thinking", num_hidden_layers=2),
        "k2.5": tiny_config("kimi-k2.5", num_hidden_layers=2),
    }
    for seed, (name, config) in enumerate(configs.items()):
        write_synthetic_checkpoint(root / name, config, seed=seed)
    return {name: root / name for name in configs}


@pytest.fixture(autouse=True)
def _line(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "test_plugin" not in request.node.nodeid:
        for name, module in line.stand_ins().items():
            monkeypatch.setitem(sys.modules, name, module)
