"""Kimi-K2 on AWS Trainium2 and NVIDIA Hopper: `from kimi_k2 import KimiK2, convert, plan`.

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_k2.api import KimiK2, convert
    from kimi_k2.plan.report import plan

__all__ = ["KimiK2", "__version__", "convert", "plan"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("kimi-k2")
        except metadata.PackageNotFoundError:  # run from its source
            return "0+unknown"
    if name in ("KimiK2", "convert"):
        return getattr(import_module("kimi_k2.api"), name)
    if name == "plan":
        return import_module("kimi_k2.plan")  # the package is the function too
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
