"""`torch.library` operations that are called directly where nothing looks on.

Eagerly, an operation's way through PyTorch's dispatcher takes the host longer than the launch itself; a prefill has
twenty a layer. Under torch.compile, fake tensors and other modes that record or replace operations it is taken.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

_PLAIN = (Tensor, nn.Parameter)


class Operation:
    """A function and the operation registered for it; made by `kernel_operation`."""

    def __init__(self, registered: CustomOpDef, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.registered, self.function = registered, function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The operation; its first argument, a tensor, decides where it runs."""
        first = arguments[0] if arguments else next(iter(keywords.values()))
        seen = type(first) not in _PLAIN or torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
        return (self.registered if seen or not first.is_cuda else self.function)(*arguments, **keywords)

    def fake(self, *functions: Callable[..., Any]) -> None:
        """What the operation gives for tensors without data: the last function's result.

        Each is called with those of the operation's arguments that its parameters name; the first ones check.
        """
        signature = inspect.signature(self.function)
        named = [(function, list(inspect.signature(function).parameters)) for function in functions]

        def call(*arguments: Any, **keywords: Any) -> Any:
            bound = signature.bind(*arguments, **keywords)
            bound.apply_defaults()
            return [function(**{name: bound.arguments[name] for name in names}) for function, names in named][-1]

        self.registered.register_fake(call)

    @property
    def schema(self) -> torch.FunctionSchema:
        """Names and types of the arguments."""
        # torch gives an operation's schema under no public name.
        result: torch.FunctionSchema = self.registered._opoverload._schema  # noqa: SLF001
        return result


def kernel_operation(name: str, *, mutates_args: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Operation]:
    """Register a function of CUDA tensors as `torch.ops.kimi_k2.<name>`.

    All raise KernelError for a shape, dtype or device that the kernel does not take, where its library cannot be built,
    and for a launch that failed; their own docstrings name what else they refuse.

    Args:
        name: in the namespace.
        mutates_args: names of the arguments that it writes.
    """

    def decorate(function: Callable[..., Any]) -> Operation:
        registered = torch.library.custom_op(
            f"kimi_k2::{name}", function, mutates_args=mutates_args, device_types="cuda"
        )
        return Operation(registered, function)

    return decorate
