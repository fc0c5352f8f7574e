"""Our kernels are in NKI's language: by the emulator's checker at every release, and by AWS's own front-end."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import klr.frontend
import pytest

import kimi_k2.nki.kernels as package
from nki_emulator.check import RELEASES, check

MODULES = [import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)]
KERNELS = [
    value
    for module in MODULES
    for value in vars(module).values()
    if hasattr(value, "__wrapped__") and value.__wrapped__.__module__ == module.__name__
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_our_kernels_are_in_the_language_of_every_release(kernel: Any) -> None:
    assert [str(one) for release in RELEASES for one in check(kernel, release)] == []


def front_end(function: Callable[..., Any]) -> str:
    """What AWS's front-end for NKI says, but for arguments that were not given: gather and simplify."""
    try:
        klr.frontend.Kernel(function).specialize(())
    except Exception as error:
        return "" if "not supplied" in str(error) else str(error)
    return ""


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """Functions, kernels and methods that a module defines."""
    for value in vars(module).values():
        value = getattr(value, "__wrapped__", value)
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, type):
            yield from (one for one in vars(value).values() if isinstance(one, FunctionType))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_our_kernels_pass_the_front_end_of_aws(module: ModuleType, tmp_path: Path) -> None:
    """Methods too, which it does not read by itself. It cannot read `[]`, which AWS's kernels are full of."""
    file = tmp_path / "kernels.py"
    file.write_text(Path(module.__file__ or "").read_text().replace("= []\n", "= [0]\n"))
    spec = importlib.util.spec_from_file_location("copied_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    copied = sys.modules["copied_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    said = {function.__qualname__: front_end(function) for function in functions_of(copied)}
    said.pop("layer_of", None)  # runs before the kernel, in Python
    assert {name: words for name, words in said.items() if words} == {}
    assert said


def test_the_front_end_refuses_what_the_language_lacks() -> None:
    def wrong(data: Any) -> Any:
        return None if data is None else data

    assert "is operator" in front_end(wrong)
