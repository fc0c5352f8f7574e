"""Imports the NxDI contrib model, `kimi_k2.neuron.nxdi`, which needs NxD.

Its source is contrib/models/Kimi-K2-Instruct-0905/src, the layout of the upstream repository. `nxdi` is a link to it:
a checkout, an editable install and a wheel all import it as a package.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from kimi_k2.errors import KimiK2Error

PACKAGE = "kimi_k2.neuron.nxdi"
NEEDED = ("torch_xla", "neuronx_distributed", "neuronx_distributed_inference")


class NeuronUnavailableError(KimiK2Error, ImportError):
    """A part of the Neuron SDK is not installed."""


def missing() -> list[str]:
    """Names of NEEDED that cannot be imported here."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def load(module: str) -> ModuleType:
    """`<module>.py` of the contrib model.

    Raises:
        NeuronUnavailableError: NxD, NxDI or torch_xla is missing.
    """
    if absent := missing():
        raise NeuronUnavailableError(f"not importable here: {', '.join(absent)}")
    return importlib.import_module(f"{PACKAGE}.{module}")
