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

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_emulator.tensor import NkiTensor

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
    for name, part in (("triton_viz", "triton_viz"), ("triton_viz.utils", "triton_viz/utils")):
        package = ModuleType(name)
        package.__path__ = [str(Path(str(ROOT)) / part)]
        sys.modules.setdefault(name, package)
    for name in ("core", "core.simulation"):
        package = ModuleType(f"triton_viz.{name}")
        package.__path__ = [str(Path(str(ROOT), "triton_viz", *name.split(".")))]
        sys.modules.setdefault(f"triton_viz.{name}", package)
    return importlib.import_module("triton_viz.core.simulation.nki_beta2")


def ours(operation: Callable[..., None], out: tuple[Any, ...], arrays: list[Any], buffer: Any = None) -> Any:
    """The result of one operation on tiles in SBUF; `out` is shape and dtype."""
    shape, dtype = out

    @nki.jit
    def kernel(inputs: list[NkiTensor]) -> NkiTensor:
        tiles = []
        for data in inputs:
            tile = nl.ndarray(data.shape, dtype=data.dtype)
            nisa.dma_copy(tile, data)
            tiles.append(tile)
        target = nl.ndarray(shape, dtype=dtype, buffer=buffer or nl.sbuf)
        operation(target, *tiles)
        if buffer is not None:
            target, inner = nl.ndarray(shape, dtype=dtype), target
            nisa.tensor_copy(target, inner)
        result = nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(result, target)
        return result

    from nki_emulator.launch import argument
    from nki_emulator.storage import Region

    return kernel([argument(array, Region.private_hbm) for array in arrays])


def theirs(
    viz: Any, operation: Callable[..., Any], out: tuple[Any, ...], arrays: list[Any], buffer: str = "sbuf"
) -> Any:
    """The same by triton-viz."""
    shape, dtype = out
    tiles = [viz.NDArray(buffer="sbuf", value=array) for array in arrays]
    target = viz.NDArray(buffer=buffer, shape=shape, dtype=dtype)
    operation(target, *tiles)
    return target.data


def draw(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    whole = generator.integers(-64, 64, shape)
    return whole.astype(dtype) if dtype.startswith(("int", "uint")) else (whole / 8).astype(np.dtype(dtype))


def sizes(generator: np.random.Generator) -> tuple[int, int]:
    return int(generator.integers(1, 129)), int(generator.integers(1, 65))


def same(left: Any, right: Any) -> None:
    assert left.dtype == right.dtype
    assert np.array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32), equal_nan=True)


def operator(viz: Any, name: str) -> Any:
    return viz.SubOp(getattr(np, name), name.startswith("bitwise"), True)


def test_tensor_tensor(viz: Any) -> None:
    for seed in range(CASES):
        generator = np.random.default_rng(seed)
        shape, bits = sizes(generator), bool(generator.integers(2))
        name = str(generator.choice(BITS if bits else ARITHMETIC))
        dtype = "int32" if bits else "float32"
        out = shape, dtype if bits else str(generator.choice(DTYPES))
        arrays = [draw(generator, shape, dtype) for _ in range(2)]

        def run(isa: Any, op: Any) -> Callable[..., None]:
            return lambda d, a, b: isa.tensor_tensor(d, a, b, op)

        got = ours(run(nisa, getattr(nl, name)), out, arrays)
        same(got, theirs(viz, run(viz, operator(viz, name)), out, arrays))


def test_tensor_scalar(viz: Any) -> None:
    for seed in range(CASES):
        generator = np.random.default_rng(seed)
        shape, reverse = sizes(generator), bool(generator.integers(2))
        names = [str(n) for n in generator.choice(ARITHMETIC, 2)]
        out = shape, str(generator.choice(DTYPES))
        value = float(generator.integers(-8, 8)) / 8
        arrays = [draw(generator, shape, "float32"), draw(generator, (shape[0], 1), "float32")]

        def run(isa: Any, ops: list[Any], reverse: bool = reverse, value: float = value) -> Callable[..., None]:
            return lambda d, a, b: isa.tensor_scalar(d, a, ops[0], b, reverse0=reverse, op1=ops[1], operand1=value)

        got = ours(run(nisa, [getattr(nl, n) for n in names]), out, arrays)
        same(got, theirs(viz, run(viz, [operator(viz, n) for n in names]), out, arrays))


def test_tensor_copy(viz: Any) -> None:
    for seed in range(CASES):
        generator = np.random.default_rng(seed)
        out = sizes(generator), str(generator.choice((*DTYPES, "float8_e4m3", "float8_e5m2")))
        arrays = [(generator.standard_normal(out[0]) * 30).astype(np.dtype(str(generator.choice(DTYPES))))]
        same(ours(nisa.tensor_copy, out, arrays), theirs(viz, viz.tensor_copy, out, arrays))


def test_tensor_reduce(viz: Any) -> None:
    for seed in range(CASES):
        generator = np.random.default_rng(seed)
        shape, negate = sizes(generator), bool(generator.integers(2))
        name = str(generator.choice(("add", "maximum", "minimum")))
        out, arrays = ((shape[0], 1), "float32"), [draw(generator, shape, "float32")]

        def run(isa: Any, op: Any, negate: bool = negate) -> Callable[..., None]:
            return lambda d, a: isa.tensor_reduce(d, op, a, axis=1, negate=negate, keepdims=True)

        got = ours(run(nisa, getattr(nl, name)), out, arrays)
        same(got, theirs(viz, run(viz, operator(viz, name)), out, arrays))


def test_activation(viz: Any) -> None:
    for seed in range(CASES):
        generator = np.random.default_rng(seed)
        shape, scale = sizes(generator), float(generator.integers(1, 8)) / 8
        out = shape, str(generator.choice(DTYPES))
        arrays = [draw(generator, shape, str(generator.choice(DTYPES))), draw(generator, (shape[0], 1), "float32")]

        def run(isa: Any, op: Any, scale: float = scale) -> Callable[..., None]:
            return lambda d, a, b: isa.activation(d, op, a, bias=b, scale=scale)

        theirs_op = viz.SubOp(np.exp, False, False)
        same(ours(run(nisa, nl.exp), out, arrays), theirs(viz, run(viz, theirs_op), out, arrays))


def test_reciprocal(viz: Any) -> None:
    for seed in range(CASES):
        generator = np.random.default_rng(seed)
        out = sizes(generator), str(generator.choice(DTYPES))
        arrays = [draw(generator, out[0], "float32") + np.float32(0.0625)]
        same(ours(nisa.reciprocal, out, arrays), theirs(viz, viz.reciprocal, out, arrays))


def test_nc_transpose(viz: Any) -> None:
    for seed in range(CASES):
        generator = np.random.default_rng(seed)
        rows, columns = sizes(generator)
        dtype = str(generator.choice(DTYPES))
        out, arrays = ((columns, rows), dtype), [draw(generator, (rows, columns), dtype)]
        got = ours(lambda d, a: nisa.nc_transpose(d, a, engine=nisa.engine.tensor), out, arrays, nl.psum)
        engine = viz.nisa.engine.tensor
        wanted = theirs(viz, lambda d, a, e=engine: viz.nc_transpose(d, a, engine=e), out, arrays, "psum")
        same(got, wanted)


def test_nc_matmul(viz: Any) -> None:
    for seed in range(CASES):
        generator = np.random.default_rng(seed)
        deep, wide, columns = (int(generator.integers(1, 129)) for _ in range(3))
        dtype = "float32" if seed % 2 else "bfloat16"
        arrays = [draw(generator, (deep, n), dtype) for n in (wide, columns)]
        out = (wide, columns), "float32"
        got = ours(nisa.nc_matmul, out, arrays, nl.psum)
        # triton-viz multiplies BF16 in BF16; in float32 the same values are exact.
        exact = [np.asarray(array, np.float32) for array in arrays]
        same(got, theirs(viz, viz.nc_matmul, out, exact, "psum"))
