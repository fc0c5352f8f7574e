"""Without NxD, or without what it imports undeclared, the reason says what is missing."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.neuron import contrib


@pytest.mark.no_nxd_needed
@pytest.mark.parametrize("undeclared", ["scipy", "tenacity"])
def test_an_undeclared_import_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, undeclared: str) -> None:
    """A release whose source imports the package, and an environment without it."""
    (tmp_path / "storage.py").write_text(f"import os\nfrom {undeclared} import something\n")

    def find(name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name in contrib.UNDECLARED:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        assert spec.submodule_search_locations is not None
        spec.submodule_search_locations.append(str(tmp_path))
        return spec

    monkeypatch.setattr("importlib.util.find_spec", find)
    assert contrib.missing() == [undeclared]


@pytest.mark.no_nxd_needed
def test_missing_packages_are_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert contrib.missing() == list(contrib.NEEDED)
