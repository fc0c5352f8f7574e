"""What SGLang imports and PyPI lacks for a CPU: `sgl_kernel`, compiled from source there, and torchvision without CUDA.

Any name may be imported from the stand-ins; SGLang calls none of them on the ways that are taken here.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

CALLED = "a stand-in was called"
STAND_IN = f"""
class _Name(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class StandIn(metaclass=_Name):
    def __init__(self, *_, **__):
        raise RuntimeError("{CALLED}")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn
"""
STOOD_IN = {
    "sgl_kernel": ("",),
    "torchvision": (
        "",
        "io",
        "ops",
        "transforms",
        "transforms/functional",
        "transforms/v2",
        "transforms/v2/functional",
    ),
}


def environment_with_stand_ins(directory: Path) -> dict[str, str]:
    """Of a process of SGLang's on a CPU; stand-ins of packages that cannot be imported are written to `directory`."""
    for package, modules in STOOD_IN.items():
        if importlib.util.find_spec(package) is None:
            for module in modules:
                (directory / package / module).mkdir(parents=True, exist_ok=True)
                (directory / package / module / "__init__.py").write_text('__version__ = "0"\n' + STAND_IN)
    path = os.pathsep.join((str(directory), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": path}
