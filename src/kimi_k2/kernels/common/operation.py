"""`torch.library` operations that are called directly where nothing looks on.

Eagerly, an operation's way through PyTorch's dispatcher takes the host longer than the launch itself; a prefill has
twenty a layer. Under torch.compile, fake tensors and other modes that record or replace operations it is taken.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kimi_k2.kernels.common.hardware import runs_cuda
from kimi_k2.kernels.common.line import Line, Result, recall, remember

# By name all that have been registered.
OPERATIONS: dict[str, Operation] = {}
_PLAIN = (Tensor, nn.Parameter)
_RETURNS = {0: "None", 1: "Tensor"}


class Operation:
    """A kernel's Python side and the operation registered for it; made by `kernel_operation`.

    Attributes:
        line: what it takes and gives; `fits` is the line's.
        registered: PyTorch's custom operation.
    """

    def __init__(
        self, name: str, line: str, body: Callable[..., Any], also: Callable[..., Any] | None, mutates: Iterable[str]
    ) -> None:
        functools.update_wrapper(self, body)
        self.line, self._body = Line(line), body
        self.fits = self.line.fits
        parameters = inspect.signature(body).parameters.values()
        named = [parameter for parameter in parameters if parameter.kind != parameter.KEYWORD_ONLY]
        self._names = [one.name for one in named]
        self._defaults = {one.name: one.default for one in named if one.default is not one.empty}
        # A body that does not name the results returns its own.
        self._makes = len(named) < len(parameters)
        self._known: dict[Hashable, dict[str, Result]] = {}
        self._also = also
        self._asked = list(inspect.signature(also).parameters) if also else []

        def fake(*arguments: Any, **keywords: Any) -> Any:
            return self._given([result.empty() for result in self._results(self._values(arguments, keywords)).values()])

        count, mutates = len(self.line.results), tuple(mutates)
        returns = _RETURNS.get(count, f"tuple[{', '.join(['Tensor'] * count)}]")
        # PyTorch 2.11 does not find an argument that is written where its default stands for it.
        self._spelled = self._defaults if self._defaults.keys() & mutates else {}
        named = [one.replace(default=one.empty) if self._spelled else one for one in named]
        body.__signature__ = inspect.Signature(named, return_annotation=returns)  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(body, mutates_args=mutates)
        del body.__signature__  # type: ignore[attr-defined]
        self.registered = torch.library.custom_op(
            f"kimi_k2::{name}", self.function, mutates_args=mutates, device_types="cuda", schema=schema
        )
        self.registered.register_fake(fake)

    def _values(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        if len(arguments) > len(self._names) or not keywords.keys() <= set(self._names):
            raise TypeError(f"{self.__name__} takes {', '.join(self._names)}")  # type: ignore[attr-defined]
        return {**self._defaults, **dict(zip(self._names, arguments, strict=False)), **keywords}

    def _results(self, values: dict[str, Any]) -> dict[str, Result]:
        """Those of arguments that are what the kernel takes."""
        sizes = self.line.bind(values)
        if self._also is not None:
            sizes |= self._also(*(sizes.get(name) for name in self._asked)) or {}
        return self.line.made(sizes)

    def takes(self, *arguments: Any, **keywords: Any) -> bool:
        """Whether these are what the line takes, on a Hopper GPU with nvcc; the last ones may be left out."""
        named = dict(zip(self._names, arguments, strict=False))
        return runs_cuda(arguments[0].device) and self.fits(**named, **keywords)

    @staticmethod
    def _given(made: list[Tensor]) -> Any:
        return tuple(made) if len(made) > 1 else made[0] if made else None

    def function(self, *arguments: Any, **keywords: Any) -> Any:
        """The operation, not through PyTorch's dispatcher."""
        given = (*arguments, *keywords, *keywords.values()) if keywords else arguments
        key, results = recall(self._known, given)
        if results is None:
            results = self._results(self._values(arguments, keywords))
            remember(self._known, key, results)
        if not self._makes:
            return self._body(*arguments, **keywords)
        made = {name: result.empty() for name, result in results.items()}
        own = self._body(*arguments, **keywords, **made) if all(next(iter(results.values())).shape) else None
        return self._given(list(made.values())) if own is None else own

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The operation; its first argument, a tensor, decides where it runs."""
        first = arguments[0] if arguments else next(iter(keywords.values()))
        recorded = type(first) not in _PLAIN or torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
        if recorded or not first.is_cuda:
            left = {name: self._spelled[name] for name in self._names[len(arguments) :] if name in self._spelled}
            return self.registered(*arguments, **left | keywords)
        return self.function(*arguments, **keywords)


def kernel_operation(
    name: str, line: str, *, also: Callable[..., Any] | None = None, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], Operation]:
    """Register a function of CUDA tensors as `torch.ops.kimi_k2.<name>`; its line checks, makes and fakes.

    The function is called with checked arguments, and by keyword with the line's results, to write them; it is not
    called where the first one has no values. A function without such parameters returns its own. All raise
    KernelError for what the line refuses, where the library cannot be built, and for a launch that failed.

    Args:
        name: in the namespace.
        line: see `line.py`.
        also: called with the arguments and sizes that it names; raises KernelError, or returns further sizes.
        mutates_args: names of the arguments that it writes.
    """

    def decorate(body: Callable[..., Any]) -> Operation:
        return OPERATIONS.setdefault(name, Operation(name, line, body, also, mutates_args))

    return decorate
