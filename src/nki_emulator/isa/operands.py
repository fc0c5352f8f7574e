"""What instructions have in common: engine and tiles, sizes that must agree, scalars and vectors as operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np

from nki_emulator.access import Call
from nki_emulator.dtypes import INTEGERS, Array
from nki_emulator.errors import DtypeError, NkiError, PlaceError
from nki_emulator.isa.constants import engine as engines
from nki_emulator.ops import Operator
from nki_emulator.storage import Region
from nki_emulator.tensor import NkiTensor

Operation = Callable[..., None]
INSTRUCTIONS: dict[str, Operation] = {}  # `nki.isa`'s, by name


def instruction(
    *allowed: str,
    tiles: tuple[str, ...] | None = None,
    alike: tuple[str, ...] | bool = False,
    like: tuple[str, str] | None = None,
    check: Callable[[Call, str, Any], Any] = Call.tile,
    default: Callable[[Mapping[str, Any]], str | None] = lambda arguments: None,
) -> Callable[[Operation], Operation]:
    """Make an instruction of `nki.isa` of a function that is given its `Call` first.

    Every instruction of NKI takes a last argument `name`, which does nothing here.

    Args:
        allowed: engines; where there are several, the argument `engine` says which.
        tiles: arguments that `check` is to pass; None: all that are annotated as an NkiTensor.
        alike: of these (True: all tiles), those of as many partitions and elements a partition.
        like: an argument, and another that is to have its dtype.
        check: see `tiles`.
        default: of the arguments, the engine where none is asked for; None: the first of `allowed`.
    """

    def decorate(function: Operation) -> Operation:
        operation, (_, *names) = function.__name__, inspect.signature(function).parameters
        checked = tiles
        if checked is None:
            checked = tuple(operand for operand in names if function.__annotations__[operand] == "NkiTensor")
        same = (checked if alike else ()) if isinstance(alike, bool) else alike

        def engine_of(arguments: Mapping[str, Any]) -> str:
            asked = arguments.get("engine") if len(allowed) > 1 else None
            if asked is None or asked is engines.unknown:
                return default(arguments) or allowed[0]
            if asked.name not in allowed:
                raise NkiError(f"nki.isa.{operation}", "engine", " or ".join(allowed), asked.name)
            return str(asked.name)

        @wraps(function)
        def run(*arguments: Any, name: str | None = None, **named: Any) -> None:
            arguments = arguments[: len(names)] if len(arguments) == len(names) + 1 else arguments
            bound = dict(zip(names, arguments, strict=False)) | named
            call = Call(operation, engine_of(bound))
            for operand in checked:
                if operand in bound:
                    check(call, operand, bound[operand])
            if same:
                same_sizes(call, **{operand: bound[operand] for operand in same if operand in bound})
            if like is not None and (dtype := bound[like[0]].dtype) != (other := bound[like[1]].dtype):
                raise call.fail(like[1], f"dtype {dtype} of {like[0]}", other, DtypeError)
            function(call, *arguments, **named)

        INSTRUCTIONS[operation] = run
        return run

    return decorate


def same_sizes(call: Call, **tensors: NkiTensor) -> None:
    """All operands have the partitions and the elements a partition of the first."""
    first, *others = tensors.items()
    for operand, tensor in others:
        rule = f"{first[1].shape[0]} partitions and {first[1].free_size} elements each, as {first[0]}"
        holds = tensor.shape[0] == first[1].shape[0] and tensor.free_size == first[1].free_size
        call.need(holds, operand, rule, tensor.shape)


def shaped(values: Array, like: NkiTensor) -> Array:
    """Values in the shape of a tensor of as many elements."""
    return values if values.shape == like.shape else values.reshape(like.shape)


def not_both_in_psum(call: Call, first: NkiTensor, second: NkiTensor, operand: str) -> None:
    """Two inputs of the Vector Engine come from PSUM one at a time."""
    if first.buffer is Region.psum and second.buffer is Region.psum:
        raise call.fail(operand, "in SBUF: two inputs cannot both lie in PSUM", kind=PlaceError)


def vector_operand(
    call: Call, operand: str, value: Any, data: NkiTensor, *, dtypes: tuple[str, ...] | None = ("float32",)
) -> Any:
    """A scalar, or a [partitions, 1] tile, as something that broadcasts against data flattened to two dimensions."""
    if isinstance(value, NkiTensor):
        call.tile(operand, value)
        holds = value.shape[0] == data.shape[0] and value.free_size == 1
        call.need(holds, operand, f"a scalar or ({data.shape[0]}, 1)", value.shape)
        if dtypes is not None and value.dtype not in dtypes:
            raise call.fail(operand, f"one of {', '.join(dtypes)}", value.dtype, DtypeError)
        return call.read32(operand, value).reshape(-1, 1)
    if value is None:
        return None
    return np.float32(value)


def need_operator(call: Call, operand: str, op: Any) -> Operator:
    """An operator that the ALU has."""
    if not isinstance(op, Operator) or op.alu is None:
        raise call.fail(operand, "an ALU operator of nki.language", op, NkiError)
    return op


def need_integers(call: Call, operator: Operator, **tensors: NkiTensor) -> None:
    """Bitvec operators take integers only."""
    for operand, tensor in tensors.items():
        if tensor.dtype not in INTEGERS:
            raise call.fail(operand, f"an integer dtype for {operator}", tensor.dtype, DtypeError)


def apply(operator: Operator, left: Any, right: Any, reverse: bool = False) -> Any:
    """One ALU stage in float32 (or on integers, for bitvec operators)."""
    assert operator.alu is not None
    with np.errstate(all="ignore"):
        if operator.unary:
            return operator.alu(left)
        return operator.alu(right, left) if reverse else operator.alu(left, right)


def begun(call: Call, engine: str, command: Any) -> Array:
    """An engine's accumulator, float32 [128, 1], which an earlier instruction has begun."""
    register: Array | None = call.core.registers[engine]
    if register is None:
        raise call.fail("reduce_cmd", "reset_reduce before reduce", command, NkiError)
    return register


def write_reduced(call: Call, reduce_res: NkiTensor, values: Array) -> None:
    """Values of an accumulator, [partitions, 1], to where they are read out."""
    call.tile("reduce_res", reduce_res)
    holds = reduce_res.shape[0] == len(values) and reduce_res.free_size == 1
    call.need(holds, "reduce_res", f"({len(values)}, 1)", reduce_res.shape)
    call.write("reduce_res", reduce_res, values.reshape(reduce_res.shape).copy())


def rows(values: Array) -> Array:
    """[partitions, elements of each]."""
    return values.reshape(values.shape[0], -1)
