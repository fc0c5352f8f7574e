"""Stand-ins for an engine that is not installed: its modules, and what it says of a model."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kimi_k2.config import KimiK2Config


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """An empty module, and the packages that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if not hasattr(sys.modules.get(path), "fake"):
            made = ModuleType(path)
            vars(made).update(fake=True, __path__=[])
            monkeypatch.setitem(sys.modules, path, made)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], made)
    return sys.modules[name]


def model(**changed: Any) -> SimpleNamespace:
    """Hugging Face's configuration of K2."""
    raw = {**KimiK2Config.load("kimi-k2-instruct-0905").to_hf_dict(), **changed}
    return SimpleNamespace(to_dict=lambda: raw)
