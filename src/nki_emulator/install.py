"""Make `nki` importable where the vendor's is not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`nki.jit`: a kernel that runs on the emulator; options of the compiler are taken and left aside."""
    from nki_emulator.launch import Kernel

    return (lambda inner: Kernel(inner)) if function is None else Kernel(function)


def simulate(kernel: Any) -> Any:
    """`nki.simulate`: the kernel itself, which runs here anyway."""
    from nki_emulator.launch import Kernel

    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)


def install(*, force: bool = False) -> bool:
    """Register the emulator as `nki`; returns whether it did (False: a real `nki` is importable, and is left alone).

    A stand-in that only serves imports, which says so by `is_standin` on its module and loader, is replaced.

    Args:
        force: take the place of a real `nki` too, which nothing in the process must have imported.
    """
    present = sys.modules.get("nki")
    if present is not None:
        if getattr(present, "is_emulator", None) is True:
            return True
        if getattr(present, "is_standin", None) is not True and not force:
            return False
    elif not force and _real_nki():
        return False
    from nki_emulator import collectives, isa, language
    from nki_emulator.dtypes import NUMPY, PACKED
    from nki_emulator.isa import constants

    root = ModuleType("nki", "NKI on nki_emulator.")
    root.__path__ = []
    typing = ModuleType("nki.typing")
    typing.tensor = language.NkiTensor  # type: ignore[attr-defined]
    dtype = ModuleType("nki.dtype")
    dtype.__dict__.update({name: name for name in (*NUMPY, *PACKED)})
    modules: dict[str, Any] = {
        "isa": isa,
        "language": language,
        "collectives": collectives,
        "typing": typing,
        "dtype": dtype,
    }
    for name, value in {**modules, "jit": jit, "simulate": simulate, "is_emulator": True}.items():
        setattr(root, name, value)
    for name in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "nki"]:
        del sys.modules[name]
    sys.modules["nki"] = root
    sys.modules.update({f"nki.{name}": module for name, module in modules.items()})
    sys.modules["nki.isa.constants"] = constants
    return True


def _real_nki() -> bool:
    try:
        spec = importlib.util.find_spec("nki.isa")
    except (ImportError, ValueError):
        return False
    return spec is not None and getattr(spec.loader, "is_standin", None) is not True
