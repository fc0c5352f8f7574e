"""Which implementation an operation of the plain model uses: the first of an explicit order that takes the arguments.

The plain function is decorated with `dispatched`; it is always the last entry, so that the model runs on every device.
Kernel modules are imported when a CUDA tensor first asks for them: Triton and nvcc are not needed elsewhere.

`KIMI_K2_KERNELS=op=name,op=name` (or `pin`) fixes a choice; `plain` pins the plain function.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from kimi_k2.errors import KernelError

ENVIRONMENT = "KIMI_K2_KERNELS"
PLAIN = "plain"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Implementation:
    """An entry of the table.

    Attributes:
        name: what pins and `explain` call it.
        module: of the package; has `supports_<op>` and `<op>`, both with the plain function's arguments.
    """

    name: str
    module: str

    def takes(self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Whether this entry takes the call: shapes, dtypes, device."""
        return bool(self._attribute(f"supports_{operation}")(*arguments, **keywords))

    def call(self, operation: str) -> Callable[..., Any]:
        """The function itself."""
        return self._attribute(operation)

    def _attribute(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(self.module), name)
        return found


# The order within an operation is the order of preference; the plain function follows by itself.
TABLE: dict[str, tuple[Implementation, ...]] = {
    "apply_rotary_interleaved": (Implementation("triton", "kimi_k2.kernels.rowwise.prefill"),),
    "dequantize_fp8_block": (Implementation("triton", "kimi_k2.kernels.rowwise.prefill"),),
    "fp8_linear": (Implementation("triton_decode", "kimi_k2.kernels.linear.fused_linear"),),
    "mla_absorbed_attention": (Implementation("mla_decode", "kimi_k2.kernels.dispatch_entries"),),
    "mla_naive_attention": (Implementation("mla_prefill", "kimi_k2.kernels.attention.mla_prefill"),),
    "rms_norm": (Implementation("triton", "kimi_k2.kernels.rowwise.prefill"),),
    "route": (Implementation("router", "kimi_k2.kernels.dispatch_entries"),),
    "routed_experts": (
        Implementation("moe_decode", "kimi_k2.kernels.experts.fp8_decode"),
        Implementation("moe_fp8", "kimi_k2.kernels.dispatch_entries"),
        Implementation("moe_w4a16", "kimi_k2.kernels.experts.w4a16"),
    ),
    "store_entries": (Implementation("triton", "kimi_k2.kernels.rowwise.prefill"),),
}
_pins: dict[str, str] = {}
_chosen: dict[str, dict[str, int]] = {}


def parse_pins(text: str) -> dict[str, str]:
    """`op=name,op=name` as a dictionary.

    Raises:
        KernelError: an operation or a name that the table lacks.
    """
    pins = {}
    for item in filter(None, text.split(",")):
        operation, _, name = item.partition("=")
        names = [entry.name for entry in TABLE.get(operation, ())] + [PLAIN]
        if operation not in TABLE or name not in names:
            known = ", ".join(f"{op}={'|'.join([e.name for e in entries] + [PLAIN])}" for op, entries in TABLE.items())
            raise KernelError(f"{item!r} is no kernel choice; expected {known}")
        pins[operation] = name
    return pins


def pin(text: str | None = None) -> None:
    """Fix the choices in `text`, or those of the environment variable if it is None; others become free again."""
    pins = parse_pins(os.environ.get(ENVIRONMENT, "") if text is None else text)
    _pins.clear()
    _pins.update(pins)
    _chosen.clear()


def allows(operation: str, name: str) -> bool:
    """Whether no pin keeps `operation` from the entry `name`, for callers that join it with another operation."""
    return _pins.get(operation, name) == name


def choose(operation: str, *arguments: Any, **keywords: Any) -> Implementation | None:
    """The entry that takes this call, None for the plain function.

    Raises:
        KernelError: the pinned entry does not take these arguments.
    """
    if not _on_cuda(arguments) or _pins.get(operation) == PLAIN:
        return None
    for entry in TABLE[operation]:
        pinned = _pins.get(operation)
        if pinned is not None and pinned != entry.name:
            continue
        if entry.takes(operation, arguments, keywords):
            return entry
        if pinned is not None:
            raise KernelError(f"{operation}={pinned} is pinned, but does not take these shapes, dtypes or this device")
    return None


def explain() -> str:
    """One line an operation: which entries were used, how many calls each, and the order of the table."""
    lines = []
    for operation, entries in TABLE.items():
        used = ", ".join(f"{name} ({count} calls)" for name, count in _chosen.get(operation, {}).items())
        order = " > ".join([entry.name for entry in entries] + [PLAIN])
        lines.append(f"{operation}: {used or 'not called'}; order {order}")
    return "\n".join(lines)


def dispatched(operation: str) -> Callable[[_Function], _Function]:
    """Make a plain function the last entry of `operation`."""

    def decorate(plain: _Function) -> _Function:
        @functools.wraps(plain)
        def call(*arguments: Any, **keywords: Any) -> Any:
            entry = choose(operation, *arguments, **keywords)
            counts = _chosen.setdefault(operation, {})
            name = PLAIN if entry is None else entry.name
            counts[name] = counts.get(name, 0) + 1
            return (plain if entry is None else entry.call(operation))(*arguments, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def _on_cuda(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, Tensor) and argument.is_cuda for argument in arguments)


pin()
