"""Classes by name that are found by looking through a package: a file that is added there is known."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind.

    Args:
        package: whose modules are imported when the classes are first asked for; a module elsewhere registers its
            classes when it is imported.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self._known: dict[str, type[T]] = {}
        self._searched = False

    def register(self, cls: type[T]) -> type[T]:
        """Class decorator: known by the class's `name`."""
        self._known[str(vars(cls)["name"])] = cls
        return cls

    def known(self) -> Mapping[str, type[T]]:
        """All classes by name, in the order of their modules' names."""
        if not self._searched:
            self._searched = True
            for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__):
                importlib.import_module(f"{self.package}.{module.name}")
        return dict(sorted(self._known.items(), key=lambda item: item[1].__module__))
