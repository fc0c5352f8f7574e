"""The table of requirements against this environment: where NxD runs, nothing of it is missing."""

from __future__ import annotations

import importlib
import importlib.util

import environment
import pytest
from harness import launch

from kimi_k2.neuron.requirements import EXECUTION, REQUIREMENTS, missing, state


@pytest.mark.no_nxd_needed
def test_what_is_importable_imports_and_what_is_not_does_not() -> None:
    for requirement in (*REQUIREMENTS, *EXECUTION):
        if requirement.module.startswith(("neuronx", "torch_xla")):
            continue  # importing these takes seconds and, for NxD, the stand-ins
        if state(requirement).importable:
            importlib.import_module(requirement.module)
        else:
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(requirement.module)


def test_nothing_is_missing_where_nxd_runs() -> None:
    assert environment.missing() is None
    assert missing() == []
    importlib.import_module("neuronx_distributed_inference.models.model_base")


@pytest.mark.no_nxd_needed
def test_without_jax_what_executes_graphs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match="needs jax"):
        launch(importlib.import_module, "never", ranks=2, way="executed")
