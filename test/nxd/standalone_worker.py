"""pytest over the folder of `contrib.standalone`, with NxD and without `kimi_k2`.

python standalone_worker.py cpu test/unit               # NxD's CPU mode
python standalone_worker.py mocked test/integration     # compiler and device mocked, see mocked_neuron.py
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import mocked_neuron
import pytest
import torch

import kimi_k2.neuron.standins.torch_neuronx  # noqa: F401 - it is looked up later
from kimi_k2.neuron import cpu, standins

HOMES = {"config": "options", "patches": "modeling_kimi_k2"}


def without_the_package() -> None:
    """`kimi_k2` can no longer be imported; what stands for the SDK's binary modules stays."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "kimi_k2"]:
        if not name.startswith(standins.__name__):
            del sys.modules[name]
    sys.modules["kimi_k2"] = None  # type: ignore[assignment]


def part(name: str) -> ModuleType:
    """The folder's file that has what the class's module `name` has."""
    return importlib.import_module(f"src.{HOMES.get(name, name)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv.pop(1) == "mocked":
        mocked_neuron.install()
        setattr(mocked_neuron, "contrib", SimpleNamespace(load=part))  # noqa: B010 - a module, elsewhere
    else:
        cpu.prepare()
    without_the_package()
    sys.exit(pytest.main(sys.argv[1:]))
