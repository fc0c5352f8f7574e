"""The emulator against triton-viz's interpreter of NKI: 1,000 drawn cases of the operations that both have.

TRITON_VIZ names a checkout of github.com/Deep-Learning-Profiling-Tools/triton-viz. Values are multiples of 1/8, so that
sums are exact in any order.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_emulator.tensor import NkiTensor

from .tiles import on_tiles

RELEASE = None  # kernels that show what the emulator takes

ROOT = os.environ.get("TRITON_VIZ")
pytestmark = pytest.mark.skipif(ROOT is None, reason="needs TRITON_VIZ, a checkout of triton-viz")
CASES = 125  # of each of 8 operations
DTYPES = ("float32", "bfloat16", "float16")
ARITHMETIC = ("add", "subtract", "multiply", "maximum", "minimum")
BITS = ("bitwise_and", "bitwise_or", "bitwise_xor")


@pytest.fixture(scope="module")
def viz() -> Any:
    """Its interpreter, without the package's own imports."""
    for name, path in (("triton_viz", "triton_viz"), ("triton_viz.utils", "triton_viz/utils")):
        package = ModuleType(name)
        package.__path__ = [str(Path(str(ROOT)) / path)]
        sys.modules.setdefault(name, package)
    for name in ("core", "core.simulation"):
        package = ModuleType(f"triton_viz.{name}")
        package.__path__ = [str(Path(str(ROOT), "triton_viz", *name.split(".")))]
        sys.modules.setdefault(f"triton_viz.{name}", package)
    return importlib.import_module("triton_viz.core.simulation.nki_beta2")


Operator = Callable[[str], Any]
# What runs on tiles, first its target; the target's shape and dtype; the other tiles' values.
Drawn = tuple[Callable[..., Any], tuple[Any, ...], list[Any]]


def draw(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    whole = generator.integers(-64, 64, shape)
    return whole.astype(dtype) if dtype.startswith(("int", "uint")) else (whole / 8).astype(np.dtype(dtype))


def sizes(generator: np.random.Generator) -> tuple[int, int]:
    return int(generator.integers(1, 129)), int(generator.integers(1, 65))


# An operation drawn from a generator, of `nki.isa` or of triton-viz, and operators by name.


def tensor_tensor(generator: np.random.Generator, isa: Any, op: Operator) -> Drawn:
    shape, bits = sizes(generator), bool(generator.integers(2))
    name = str(generator.choice(BITS if bits else ARITHMETIC))
    dtype = "int32" if bits else "float32"
    out = shape, dtype if bits else str(generator.choice(DTYPES))
    arrays = [draw(generator, shape, dtype) for _ in range(2)]
    return lambda d, a, b: isa.tensor_tensor(d, a, b, op(name)), out, arrays


def tensor_scalar(generator: np.random.Generator, isa: Any, op: Operator) -> Drawn:
    shape, reverse = sizes(generator), bool(generator.integers(2))
    first, second = (op(str(name)) for name in generator.choice(ARITHMETIC, 2))
    out = shape, str(generator.choice(DTYPES))
    value = float(generator.integers(-8, 8)) / 8
    arrays = [draw(generator, shape, "float32"), draw(generator, (shape[0], 1), "float32")]
    return lambda d, a, b: isa.tensor_scalar(d, a, first, b, reverse0=reverse, op1=second, operand1=value), out, arrays


def tensor_copy(generator: np.random.Generator, isa: Any, op: Operator) -> Drawn:
    out = sizes(generator), str(generator.choice((*DTYPES, "float8_e4m3", "float8_e5m2")))
    values = (generator.standard_normal(out[0]) * 30).astype(np.dtype(str(generator.choice(DTYPES))))
    return isa.tensor_copy, out, [values]


def tensor_reduce(generator: np.random.Generator, isa: Any, op: Operator) -> Drawn:
    shape, negate = sizes(generator), bool(generator.integers(2))
    reduction = op(str(generator.choice(("add", "maximum", "minimum"))))
    out, arrays = ((shape[0], 1), "float32"), [draw(generator, shape, "float32")]
    return lambda d, a: isa.tensor_reduce(d, reduction, a, axis=1, negate=negate, keepdims=True), out, arrays


def activation(generator: np.random.Generator, isa: Any, op: Operator) -> Drawn:
    shape, scale = sizes(generator), float(generator.integers(1, 8)) / 8
    out = shape, str(generator.choice(DTYPES))
    arrays = [draw(generator, shape, str(generator.choice(DTYPES))), draw(generator, (shape[0], 1), "float32")]
    return lambda d, a, b: isa.activation(d, op("exp"), a, bias=b, scale=scale), out, arrays


def reciprocal(generator: np.random.Generator, isa: Any, op: Operator) -> Drawn:
    out = sizes(generator), str(generator.choice(DTYPES))
    return isa.reciprocal, out, [draw(generator, out[0], "float32") + np.float32(0.0625)]


def nc_transpose(generator: np.random.Generator, isa: Any, op: Operator) -> Drawn:
    rows, columns = sizes(generator)
    dtype = str(generator.choice(DTYPES))
    engine = getattr(isa, "nisa", isa).engine.tensor
    arrays = [draw(generator, (rows, columns), dtype)]
    return lambda d, a: isa.nc_transpose(d, a, engine=engine), ((columns, rows), dtype), arrays


def nc_matmul(generator: np.random.Generator, isa: Any, op: Operator) -> Drawn:
    deep, wide, columns = (int(generator.integers(1, 129)) for _ in range(3))
    dtype = str(generator.choice(("float32", "bfloat16")))
    arrays = [draw(generator, (deep, n), dtype) for n in (wide, columns)]
    if isa is not nisa:  # triton-viz multiplies BF16 in BF16; in float32 the same values are exact
        arrays = [np.asarray(array, np.float32) for array in arrays]
    return isa.nc_matmul, ((wide, columns), "float32"), arrays


OPERATIONS = (
    tensor_tensor, tensor_scalar, tensor_copy, tensor_reduce, activation, reciprocal, nc_transpose, nc_matmul,
)  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_operation(operation: Callable[..., Drawn], viz: Any) -> None:
    of_tensor_engine = operation in (nc_transpose, nc_matmul)

    def theirs_op(name: str) -> Any:
        return viz.SubOp(getattr(np, name), name in BITS, name != "exp")

    for seed in range(CASES):
        run, (shape, dtype), arrays = operation(np.random.default_rng(seed), nisa, lambda name: getattr(nl, name))

        def body(*tiles: NkiTensor, run: Any = run, shape: Any = shape, dtype: str = dtype) -> NkiTensor:
            tile = nl.ndarray(shape, dtype=dtype, buffer=nl.psum if of_tensor_engine else nl.sbuf)
            run(tile, *tiles)
            return tile

        ours = on_tiles(body, *arrays)
        run, _, arrays = operation(np.random.default_rng(seed), viz, theirs_op)
        theirs = viz.NDArray(buffer="psum" if of_tensor_engine else "sbuf", shape=shape, dtype=dtype)
        run(theirs, *(viz.NDArray(buffer="sbuf", value=array) for array in arrays))
        assert ours.dtype == theirs.data.dtype
        assert np.array_equal(np.asarray(ours, np.float32), np.asarray(theirs.data, np.float32), equal_nan=True)
