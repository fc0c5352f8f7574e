"""`nki.isa`: element by element on the Vector, Scalar and GpSimd Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nki_emulator.access import Call
from nki_emulator.dtypes import NUMPY
from nki_emulator.errors import NkiError
from nki_emulator.isa.constants import engine as engines
from nki_emulator.isa.constants import reduce_cmd as commands
from nki_emulator.isa.operands import (
    apply,
    begun,
    instruction,
    need_integers,
    need_operator,
    not_both_in_psum,
    rows,
    shaped,
    vector_operand,
    write_reduced,
)
from nki_emulator.ops import OPERATORS, Operator
from nki_emulator.storage import Region
from nki_emulator.tensor import NkiTensor

_WIDE_INTEGERS = ("int32", "uint32")
# The pairs of operators that the Scalar Engine of Trainium2 has in tensor_scalar.
_SCALAR_PAIRS = {("multiply", "add"), ("multiply", None), ("add", None)}


def _all32(*tensors: NkiTensor) -> bool:
    return all(tensor.dtype in _WIDE_INTEGERS for tensor in tensors)


def _of_tensor_tensor(arguments: Mapping[str, Any]) -> str | None:
    tensors = [arguments[operand] for operand in ("dst", "data1", "data2")]
    exact = _all32(*tensors) and all(tensor.buffer is Region.sbuf for tensor in tensors)
    return "gpsimd" if exact or arguments["op"] is OPERATORS["power"] else None


@instruction("vector", "gpsimd", alike=True, default=_of_tensor_tensor)
def tensor_tensor(
    call: Call, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Any, engine: Any = engines.unknown
) -> None:
    """data1 <op> data2, in float32; 32-bit integers exactly (GpSimd) unless the Vector Engine is asked for."""
    operator = need_operator(call, "op", op)
    if operator.unary:
        raise call.fail("op", "a binary operator", operator, NkiError)
    not_both_in_psum(call, data1, data2, "data2")
    if operator.bits:
        need_integers(call, operator, dst=dst, data1=data1, data2=data2)
        left, right = call.read("data1", data1), call.read("data2", data2)
    elif _all32(dst, data1, data2) and call.engine == "gpsimd":
        left = call.read("data1", data1).astype(np.int64)
        right = call.read("data2", data2).astype(np.int64)
    else:
        left, right = call.read32("data1", data1), call.read32("data2", data2)
    result = apply(operator, shaped(left, dst), shaped(right, dst))
    if result.dtype == np.int64:
        result = result.astype(NUMPY[dst.dtype])
    call.write("dst", dst, result)


@instruction(
    "vector", "scalar", "gpsimd", alike=True,
    default=lambda arguments: "gpsimd" if arguments["op0"] is OPERATORS["rsqrt"] else None,
)  # fmt: skip
def tensor_scalar(
    call: Call, dst: NkiTensor, data: NkiTensor, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None,
    operand1: Any = None, reverse1: bool = False, engine: Any = engines.unknown,
) -> None:  # fmt: skip
    """(data <op0> operand0) <op1> operand1; operands are scalars or one value a partition, in float32."""
    stages = [(need_operator(call, "op0", op0), "operand0", operand0, reverse0)]
    if op1 is not None:
        stages.append((need_operator(call, "op1", op1), "operand1", operand1, reverse1))
    elif operand1 is not None:
        raise call.fail("operand1", "None without op1", operand1, NkiError)
    if len({operator.bits for operator, *_ in stages}) > 1:
        raise call.fail("op1", "bitvec or arithmetic as op0", op1, NkiError)
    if (
        call.engine == "scalar"
        and (stages[0][0].name, stages[1][0].name if op1 is not None else None) not in _SCALAR_PAIRS
    ):
        raise call.fail("op0", "multiply and add, multiply, or add on the Scalar Engine", op0, NkiError)
    if call.engine == "vector" and any(operator.name == "rsqrt" for operator, *_ in stages):
        raise call.fail("op0", "rsqrt on GpSimd or the Scalar Engine", op0, NkiError)
    bits = stages[0][0].bits
    if bits:
        need_integers(call, stages[0][0], dst=dst, data=data)
        if call.engine != "vector":
            raise call.fail("engine", "vector for bitvec operators", call.engine, NkiError)
    result = rows(call.read("data", data) if bits else call.read32("data", data))
    for operator, operand, value, reverse in stages:
        if operator.unary:
            call.need(value is None or (not isinstance(value, NkiTensor) and value == 0), operand, "None or 0", value)
        if bits:
            right = _bits_operand(call, operand, value, data)
        else:
            right = vector_operand(call, operand, value, data, dtypes=None)
        if right is None and not operator.unary:
            raise call.fail(operand, f"a value for {operator}", None, NkiError)
        result = apply(operator, result, right, reverse)
    call.write("dst", dst, shaped(np.ascontiguousarray(result), dst))


def _bits_operand(call: Call, operand: str, value: Any, data: NkiTensor) -> Any:
    if isinstance(value, NkiTensor):
        need_integers(call, OPERATORS["bitwise_and"], **{operand: value})
        return call.read(operand, value).reshape(-1, 1)
    return None if value is None else NUMPY[data.dtype].type(value)


@instruction("vector", alike=True)
def scalar_tensor_tensor(
    call: Call,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """(data <op0> operand0) <op1> operand1, where operand1 is a tile."""
    not_both_in_psum(call, data, operand1, "operand1")
    first, second = need_operator(call, "op0", op0), need_operator(call, "op1", op1)
    if first.bits or second.bits:
        raise call.fail("op0", "arithmetic operators", op0, NkiError)
    scalar = vector_operand(call, "operand0", operand0, data, dtypes=None)
    result = apply(first, rows(call.read32("data", data)), scalar, reverse0)
    call.write("dst", dst, shaped(apply(second, result, rows(call.read32("operand1", operand1)), reverse1), dst))


@instruction("scalar", alike=True)
def activation(
    call: Call, dst: NkiTensor, op: Any, data: NkiTensor, bias: Any = None, scale: Any = 1.0, reduce_op: Any = None,
    reduce_res: NkiTensor | None = None, reduce_cmd: Any = commands.idle,
) -> None:  # fmt: skip
    """op(data * scale + bias) on the Scalar Engine, and optionally its sum over each partition."""
    _activation(call, dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


@instruction("scalar", alike=True)
def activation_reduce(
    call: Call,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    bias: Any = None,
    scale: Any = 1.0,
) -> None:
    """`activation` with `reduce_cmd.reset_reduce`."""
    _activation(call, dst, op, data, bias, scale, reduce_op, reduce_res, commands.reset_reduce)


def _activation(
    call: Call, dst: NkiTensor, op: Any, data: NkiTensor, bias: Any, scale: Any, reduce_op: Any,
    reduce_res: NkiTensor | None, reduce_cmd: Any,
) -> None:  # fmt: skip
    if not isinstance(op, Operator) or op.activation is None:
        raise call.fail("op", "an activation function of nki.language", op, NkiError)
    if reduce_op is not None and reduce_op is not OPERATORS["add"]:
        raise call.fail("reduce_op", "nl.add", reduce_op, NkiError)
    inner = rows(call.read32("data", data))
    factor = vector_operand(call, "scale", scale, data)
    shift = vector_operand(call, "bias", bias, data, dtypes=None)
    with np.errstate(all="ignore"):
        if not (isinstance(factor, np.float32) and factor == 1):
            inner = inner * factor
        if shift is not None:
            inner = inner + shift
        _need_valid(call, op, inner)
        result = np.asarray(op.activation(inner), np.float32)
    if reduce_cmd in (commands.reset, commands.reset_reduce):
        call.core.accumulator("scalar", 0.0)
    if reduce_cmd in (commands.reduce, commands.reset_reduce):
        begun(call, "scalar", reduce_cmd)[: len(result)] += result.sum(axis=1, keepdims=True)
    call.write("dst", dst, shaped(result, dst))
    if reduce_res is not None:
        register = call.core.registers["scalar"]
        if register is None:
            raise call.fail("reduce_res", "a reduction to read", reduce_cmd, NkiError)
        write_reduced(call, reduce_res, register[: data.shape[0]])


def _need_valid(call: Call, op: Operator, values: Any) -> None:
    if op.valid is None:
        return
    low, high = op.valid
    wrong = (values < low) | (values > high)
    if wrong.any():
        call.instruction.details["outside"] = float(values[wrong][0])
        if op.name == "sin":
            rule = f"within [{low:.4g}, {high:.4g}], where the Scalar Engine's {op} is right"
            raise call.fail("data", rule, float(values[wrong][0]), NkiError)


@instruction("vector", alike=True)
def reciprocal(call: Call, dst: NkiTensor, data: NkiTensor) -> None:
    """1 / data on the Vector Engine."""
    call.write("dst", dst, shaped(apply(OPERATORS["reciprocal"], call.read32("data", data), None), dst))


@instruction("gpsimd", alike=True)
def affine_select(
    call: Call,
    dst: NkiTensor,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = OPERATORS["equal"],
    offset: int = 0,
) -> None:
    """on_true_tile where an affine expression compares true with 0, on_false_value elsewhere."""
    from nki_emulator.isa.copies import affine

    chosen = apply(need_operator(call, "cmp_op", cmp_op), affine(call, dst, pattern, offset, channel_multiplier), 0)
    values = shaped(call.read32("on_true_tile", on_true_tile), dst)
    call.write("dst", dst, np.where(chosen != 0, values, np.float32(on_false_value)))


def accumulate(
    call: Call,
    values: Any,
    reduce_op: Any,
    reduce_cmd: Any,
    initial: Any,
    reduce_res: NkiTensor | None,
    negate: bool = False,
) -> None:
    """Reduce rows into the Vector Engine's accumulators, and read them out."""
    operator = need_operator(call, "reduce_op", reduce_op)
    if operator.start is None:
        raise call.fail("reduce_op", "a reduction", reduce_op, NkiError)
    count = len(values)
    if reduce_cmd is commands.reset_reduce:
        call.core.accumulator("vector", operator.start)
    elif reduce_cmd is commands.load_reduce:
        if initial is None:
            raise call.fail("reduce_init", "a value for load_reduce", None, NkiError)
        call.core.accumulator("vector", 0.0)[:count] = initial
    register = begun(call, "vector", reduce_cmd)
    register[:count] = apply(operator, register[:count], operator.reduce(values, (1,)))
    if reduce_res is not None:
        write_reduced(call, reduce_res, -register[:count] if negate else register[:count])
