"""Imports the NxDI model, `kimi_k2.neuron.nxdi`, which needs NxD."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

from kimi_k2.errors import KimiK2Error

PACKAGE = "kimi_k2.neuron.nxdi"
NEEDED = ("torch_xla", "neuronx_distributed", "neuronx_distributed_inference")
# What a release imports without declaring it: SDK 2.29 tenacity, 2.28 scipy, both boto3.
UNDECLARED = ("boto3", "scipy", "tenacity")


class NeuronUnavailableError(KimiK2Error, ImportError):
    """A part of the Neuron SDK is not installed."""


def missing() -> list[str]:
    """Names of NEEDED that cannot be imported here; if these are there, what their source imports and is not."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return absent or [name for name in UNDECLARED if importlib.util.find_spec(name) is None and _imported(name)]


def _imported(name: str) -> bool:
    """Whether the source of NxD or NxDI imports `name` at the top of a module."""
    pattern = re.compile(rf"^(?:import|from) {name}\b", re.MULTILINE)
    specs = [importlib.util.find_spec(package) for package in NEEDED[1:]]
    roots = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    return any(pattern.search(path.read_text(errors="ignore")) for root in roots for path in root.rglob("*.py"))


def load(module: str) -> ModuleType:
    """`<module>.py` of the NxDI model.

    Raises:
        NeuronUnavailableError: NxD, NxDI or torch_xla is missing.
    """
    if absent := missing():
        raise NeuronUnavailableError(f"not importable here: {', '.join(absent)}")
    return importlib.import_module(f"{PACKAGE}.{module}")
