"""What NxD needs, against this environment; what is missing is named, imported undeclared or not."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.neuron import contrib
from kimi_k2.neuron.requirements import states

pytestmark = pytest.mark.no_nxd_needed


def test_what_is_importable_imports_and_what_is_not_does_not() -> None:
    for state in states():
        if state.requirement.module.startswith(("neuronx", "torch_xla", "vllm")):
            continue  # importing these takes seconds and, for NxD, the stand-ins
        if state.importable:
            importlib.import_module(state.requirement.module)
        else:
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(state.requirement.module)


@pytest.mark.parametrize("undeclared", ["scipy", "tenacity"])
def test_an_undeclared_import_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, undeclared: str) -> None:
    """A release whose source imports the package, and an environment without it."""
    (tmp_path / "storage.py").write_text(f"import os\nfrom {undeclared} import something\n")

    def find(name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name in contrib.UNDECLARED:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path)]
        return spec

    monkeypatch.setattr("importlib.util.find_spec", find)
    assert contrib.missing() == [undeclared]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert contrib.missing() == list(contrib.NEEDED)
