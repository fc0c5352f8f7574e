"""Stand-ins for Neuron's binary-only Python modules, so that NxD's own source runs on a CPU.

`install()` serves CPU mode and lowering to HLO. It adds a finder behind all others, so a real module always wins. Most
names are inert (they can be imported, subclassed, used as decorators); the few that must behave are in
`torch_neuronx.py` beside this.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# Top-level packages of the Neuron SDK that exist only as compiled wheels.
BINARY_ONLY = ("torch_neuronx", "neuronxcc", "nki", "nkilib", "libneuronxla", "neuronxlogger", "neuron_external_libs")


class Inert:
    """Whatever a module that only needs to be imported asks for: attribute, base class, decorator, constant."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name.rpartition(".")[2]
        self._inert_name = name

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert(f"{self._inert_name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator it leaves the function alone; as a decorator factory it returns such a decorator."""
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Inert):
            return args[0]
        return Inert(f"{self._inert_name}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, key: Any) -> Inert:
        return Inert(f"{self._inert_name}[...]")

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<stand-in for {self._inert_name}>"


class InertModule(ModuleType):
    """A module in which every name exists."""

    is_standin = True  # which `nki_emulator.install` may replace

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    is_standin = True

    def __init__(self, roots: set[str]) -> None:
        self.roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name == "libneuronxla.libneuronpjrt_path":
            raise ImportError("libneuronpjrt_path: no Neuron runtime here")  # NxD takes this as 'no device'
        return InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        from . import torch_neuronx as behaving

        behaving.fill(module)


def install() -> list[str]:
    """Make the missing binary-only packages importable; returns their names."""
    missing = [name for name in BINARY_ONLY if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        sys.meta_path.append(_Finder(set(missing)))
        _provide_script_classes()
    return missing


class _ScriptClasses(ModuleType):
    """`torch.classes.neuron`: NxD only names its members in annotations until a model is compiled."""

    SPMDModel = Any
    LayoutTransformation = Any


def _provide_script_classes() -> None:
    import torch

    torch.classes.__dict__["neuron"] = _ScriptClasses("torch.classes.neuron")
