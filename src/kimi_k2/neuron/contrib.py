"""Imports the NxDI contrib model, which lives beside this package and needs NxD."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from kimi_k2.errors import KimiK2Error

SOURCE = Path(__file__).parents[3] / "contrib" / "models" / "Kimi-K2-Instruct-0905" / "src"
PACKAGE = "kimi_k2_contrib"
NEEDED = ("torch_xla", "neuronx_distributed", "neuronx_distributed_inference")


class NeuronUnavailableError(KimiK2Error, ImportError):
    """A part of the Neuron SDK is not installed."""


def missing() -> list[str]:
    """Names of NEEDED that cannot be imported here."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def load(module: str) -> ModuleType:
    """`contrib/.../src/<module>.py` as a member of a package.

    Raises:
        NeuronUnavailableError: NxD, NxDI or torch_xla is missing.
    """
    if absent := missing():
        raise NeuronUnavailableError(f"not importable here: {', '.join(absent)}")
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, SOURCE / "__init__.py", submodule_search_locations=[str(SOURCE)]
        )
        if spec is None or spec.loader is None or not SOURCE.is_dir():
            raise NeuronUnavailableError(f"the contrib model is not at {SOURCE}: run from a checkout of the project")
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{module}")
