"""Operators of `nki.language` that instructions take: ALU operators and activation functions, in float32.

Source: aws-neuron-sdk `nki/api/nki.api.shared.rst`, tables of math operators and of activation functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_emulator.dtypes import Array

_F32 = np.float32


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        alu: function of two arrays, or of one where `unary`; None where no ALU has it.
        activation: function of one array on the Scalar Engine, or None.
        bits: a bitvec operator: integers as bit patterns.
        reduces: may be a reduction, starting from `start`.
        valid: the range in which the Scalar Engine's result is right, or None for all numbers.
    """

    name: str
    alu: Callable[..., Any] | None = None
    activation: Callable[[Array], Array] | None = None
    unary: bool = False
    bits: bool = False
    reduces: bool = False
    start: float | None = None
    valid: tuple[float, float] | None = None

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def reduce(self, values: Array, axes: tuple[int, ...]) -> Array:
        """Reduce over axes, which are kept with size 1."""
        if self.name == "add":
            return np.asarray(values.sum(axis=axes, keepdims=True, dtype=values.dtype))
        if isinstance(self.alu, np.ufunc):
            return np.asarray(self.alu.reduce(values, axis=axes, keepdims=True))
        shape = [1 if axis in axes else size for axis, size in enumerate(values.shape)]
        kept = math.prod(size for axis, size in enumerate(values.shape) if axis not in axes)
        rows = values.reshape(kept, -1)
        result = rows[:, 0]
        assert self.alu is not None
        for column in range(1, rows.shape[1]):
            result = self.alu(result, rows[:, column])
        return result.reshape(shape)


def _truth(function: Callable[..., Any]) -> Callable[..., Array]:
    return lambda a, b: np.asarray(function(a, b)).astype(_F32)


def _sigmoid(x: Array) -> Any:
    with np.errstate(over="ignore"):
        return _F32(1) / (_F32(1) + np.exp(-x))


def _erf(x: Array) -> Any:
    import torch

    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _gelu(x: Array) -> Any:
    return x * _F32(0.5) * (_F32(1) + _erf(x * _F32(math.sqrt(0.5))))


def _gelu_tanh(x: Array) -> Any:
    return _F32(0.5) * x * (_F32(1) + np.tanh(_F32(math.sqrt(2 / math.pi)) * (x + _F32(0.044715) * x**3)))


def _gelu_sigmoid(x: Array) -> Any:
    return x * _sigmoid(_F32(1.702) * x)


def _rsqrt(x: Array) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return _F32(1) / np.sqrt(x)


def _reciprocal(x: Array) -> Any:
    with np.errstate(divide="ignore"):
        return _F32(1) / x


def _right_shift(a: Array, b: Array) -> Any:
    unsigned = np.asarray(a).view(f"u{np.asarray(a).itemsize}")
    return np.right_shift(unsigned, np.asarray(b).astype(unsigned.dtype)).view(np.asarray(a).dtype)


_ALL = (
    Operator("add", np.add, reduces=True, start=0.0),
    Operator("subtract", np.subtract, reduces=True, start=0.0),
    Operator("multiply", np.multiply, reduces=True, start=1.0),
    Operator("divide", np.divide),
    Operator("maximum", np.maximum, reduces=True, start=-np.inf),
    Operator("minimum", np.minimum, reduces=True, start=np.inf),
    Operator("power", np.power),
    Operator("abs_max", lambda a, b: np.maximum(np.abs(a), np.abs(b)), reduces=True, start=0.0),
    *(
        Operator(name, _truth(getattr(np, name)))
        for name in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
    ),
    Operator("logical_and", _truth(np.logical_and), reduces=True, start=1.0),
    Operator("logical_or", _truth(np.logical_or), reduces=True, start=0.0),
    Operator("bitwise_and", np.bitwise_and, bits=True, reduces=True),
    Operator("bitwise_or", np.bitwise_or, bits=True, reduces=True),
    Operator("bitwise_xor", np.bitwise_xor, bits=True, reduces=True),
    Operator("invert", np.invert, unary=True, bits=True),
    Operator("left_shift", np.left_shift, bits=True),
    Operator("right_shift", _right_shift, bits=True),
    Operator("abs", np.abs, np.abs, unary=True),
    Operator("square", np.square, np.square, unary=True),
    Operator("relu", lambda x: np.maximum(x, 0), lambda x: np.maximum(x, 0), unary=True),
    Operator("rsqrt", _rsqrt, _rsqrt, unary=True, valid=(2.0**-87, 2.0**97)),
    Operator("reciprocal", _reciprocal, _reciprocal, unary=True),
    Operator("copy", activation=lambda x: x),
    Operator("sigmoid", activation=_sigmoid),
    Operator("silu", activation=lambda x: x * _sigmoid(x)),
    Operator("gelu", activation=_gelu),
    Operator("gelu_apprx_tanh", activation=_gelu_tanh),
    Operator("gelu_apprx_sigmoid", activation=_gelu_sigmoid),
    Operator("tanh", activation=np.tanh),
    Operator("erf", activation=_erf),
    Operator("exp", activation=np.exp),
    Operator("log", activation=np.log, valid=(2.0**-64, 2.0**64)),
    Operator("sin", activation=np.sin, valid=(-math.pi, math.pi)),
    Operator("sqrt", activation=np.sqrt, valid=(2.0**-116, 2.0**118)),
    Operator("sign", activation=np.sign),
    Operator("bypass"),
)
OPERATORS = {operator.name: operator for operator in _ALL}
