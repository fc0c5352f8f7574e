"""The table of requirements against this environment: where NxD runs, nothing of it is missing."""

from __future__ import annotations

import importlib

import environment
import pytest

from kimi_k2.neuron.requirements import REQUIREMENTS, missing, state


@pytest.mark.no_nxd_needed
def test_what_is_importable_imports_and_what_is_not_does_not() -> None:
    for requirement in REQUIREMENTS:
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
