"""Faults put into the NxDI class one at a time, by replacing a piece of a method's source."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch

TOLERANCE = 2e-5  # of logits in float32, as in the tests
Patch = tuple[Any, str, Any]
Case = Callable[[], list[str]]  # runs a test's case; names of the checks that fail
Fault = tuple[str, Callable[[], Patch]]  # the case that sees it, and what is replaced


def edited(owner: Any, method: str, old: str, new: str) -> Patch:
    """A method with a piece of its source replaced."""
    function = inspect.unwrap(getattr(owner, method))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{method} no longer contains {old!r}"
    space: dict[str, Any] = {}
    if "super()" in source:
        source = source.replace("super()", "super(_owner, self)")
    exec(compile(source.replace(old, new), f"<{method}>", "exec"), {**function.__globals__, "_owner": owner}, space)
    made = space[method]
    return owner, method, staticmethod(made) if isinstance(owner.__dict__.get(method), staticmethod) else made


def too_far(name: str, difference: float) -> list[str]:
    """The check's name with the difference, if that is too large or no number."""
    return [] if difference <= TOLERANCE else [f"{name} ({difference:.1e})"]


def beyond(name: str, found: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """The check's name if logits differ."""
    return too_far(name, float((found - expected).abs().max()))
