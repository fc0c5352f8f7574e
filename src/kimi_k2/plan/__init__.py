"""Plans a deployment before the machine is rented: memory a rank, bytes and operations a step, and what would fit.

The package is also the function of its name, `report.plan`: `from kimi_k2 import plan; plan("kimi-k2-instruct-0905")`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        from kimi_k2.plan.report import plan

        return plan(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
