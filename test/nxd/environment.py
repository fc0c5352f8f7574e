"""Makes NxD and NxDI importable for these tests, with stand-ins where the Neuron SDK's binary modules are missing."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

CONTRIB = Path(__file__).parents[2] / "contrib" / "models" / "Kimi-K2-Instruct-0905"
PACKAGE = "kimi_k2_contrib"
NEEDED = ("neuronx_distributed", "neuronx_distributed_inference", "torch_xla")


def missing() -> str | None:
    """Why these tests cannot run here, or None."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"not importable here: {', '.join(absent)}" if absent else None


def prepare(cpu: bool = True) -> list[str]:
    """Install the stand-ins (before anything of NxD is imported); returns the names they stand for."""
    if cpu:
        os.environ["NXD_CPU_MODE"] = "1"
        os.environ["PJRT_DEVICE"] = "CPU"
    if str(Path(__file__).parent) not in sys.path:
        sys.path.insert(0, str(Path(__file__).parent))
    import standins

    return standins.install()


def contrib(module: str) -> ModuleType:
    """`contrib/.../src/<module>.py`, imported as part of a package."""
    if PACKAGE not in sys.modules:
        source = CONTRIB / "src"
        spec = importlib.util.spec_from_file_location(
            PACKAGE, source / "__init__.py", submodule_search_locations=[str(source)]
        )
        assert spec and spec.loader
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{module}")
