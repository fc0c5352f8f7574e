"""What tests need of the machine that they run on."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kimi_k2.kernels.common.build import find_nvcc


def engine(name: str) -> None:
    """Skip the module of tests that calls this, where an engine is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name} (docs/engines.md): not importable here: {name}", allow_module_level=True)


def hoppers(count: int = 1) -> bool:
    """Whether there are so many Hopper GPUs, and what builds kernels for them."""
    there = torch.cuda.device_count() >= count and torch.cuda.get_device_capability() == (9, 0)
    return there and find_nvcc() is not None


def on_hoppers(count: int = 1) -> list[pytest.MarkDecorator]:
    """Marks of tests that need them."""
    return [pytest.mark.gpu, pytest.mark.skipif(not hoppers(count), reason=f"needs {count} Hopper GPUs and nvcc")]
