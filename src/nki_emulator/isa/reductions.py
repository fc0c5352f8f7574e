"""`nki.isa`: reductions, scans and statistics along the free dimensions, and across partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_emulator.access import Call
from nki_emulator.errors import NkiError
from nki_emulator.isa.constants import reduce_cmd as commands
from nki_emulator.isa.elementwise import accumulate
from nki_emulator.isa.operands import (
    apply,
    instruction,
    need_integers,
    need_operator,
    not_both_in_psum,
    rows,
    shaped,
    vector_operand,
)
from nki_emulator.limits import BN_STATS_COLUMNS
from nki_emulator.tensor import NkiTensor


@instruction("vector")
def tensor_reduce(
    call: Call,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: int | Sequence[int],
    negate: bool = False,
    keepdims: bool = False,
) -> None:
    """Reduce the last free dimensions in float32."""
    operator = need_operator(call, "op", op)
    if not operator.reduces:
        raise call.fail("op", "an operator that reduces", operator, NkiError)
    axes = tuple(sorted(a % data.ndim for a in ([axis] if isinstance(axis, int) else axis)))
    if axes != tuple(range(data.ndim - len(axes), data.ndim)) or 0 in axes:
        raise call.fail("axis", "the last free dimensions", axis)
    left = data.size // int(np.prod([data.shape[a] for a in axes]))
    call.need(dst.shape[0] == data.shape[0] and dst.size == left, "dst", f"{left} elements", dst.shape)
    if operator.bits:
        need_integers(call, operator, dst=dst, data=data)
        call.write("dst", dst, shaped(operator.reduce(call.read("data", data), axes), dst))
        return
    result = operator.reduce(call.read32("data", data), axes)
    call.write("dst", dst, shaped(-result if negate else result, dst))


@instruction("vector", alike=True)
def tensor_scalar_reduce(
    call: Call,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: Any = commands.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
) -> None:
    """data <op0> operand0, and its reduction over each partition."""
    operator = need_operator(call, "op0", op0)
    if operator.bits:
        raise call.fail("op0", "an arithmetic operator", operator, NkiError)
    if reverse0:
        raise call.fail("reverse0", "False: not supported yet", reverse0, NkiError)
    scalar = vector_operand(call, "operand0", operand0, data, dtypes=None)
    initial = vector_operand(call, "reduce_init", reduce_init, data)
    result = np.asarray(apply(operator, rows(call.read32("data", data)), scalar), np.float32)
    call.write("dst", dst, shaped(result, dst))
    accumulate(call, result, reduce_op, reduce_cmd, initial, reduce_res, reduce_res_negate)


@instruction("vector", alike=True)
def tensor_tensor_scan(
    call: Call,
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """result[i] = (data0[i] <op0> result[i - 1]) <op1> data1[i] along each partition."""
    not_both_in_psum(call, data0, data1, "data1")
    first, second = need_operator(call, "op0", op0), need_operator(call, "op1", op1)
    left, right = rows(call.read32("data0", data0)), rows(call.read32("data1", data1))
    start = vector_operand(call, "initial", initial, data0, dtypes=None)
    running = np.broadcast_to(np.asarray(start, np.float32).reshape(-1), (len(left),))
    out = np.empty_like(left)
    for column in range(left.shape[1]):
        running = apply(second, apply(first, left[:, column], running, reverse0), right[:, column], reverse1)
        out[:, column] = running
    call.write("dst", dst, shaped(out, dst))


@instruction("vector")
def bn_stats(call: Call, dst: NkiTensor, data: NkiTensor) -> None:
    """Count, mean and variance * count of the even and of the odd elements of each partition."""
    call.need(data.free_size <= BN_STATS_COLUMNS, "data", f"at most {BN_STATS_COLUMNS} elements", data.free_size)
    call.need(dst.shape[0] == data.shape[0] and dst.free_size == 6, "dst", "6 elements a partition", dst.shape)
    values = rows(call.read32("data", data))
    out = np.zeros((len(values), 6), np.float32)
    for at, columns in ((0, values[:, 0::2]), (3, values[:, 1::2])):
        if columns.shape[1]:
            mean = columns.mean(axis=1, dtype=np.float32)
            out[:, at], out[:, at + 1] = columns.shape[1], mean
            out[:, at + 2] = np.square(columns - mean[:, None]).sum(axis=1)
    call.write("dst", dst, shaped(out, dst))


@instruction("vector")
def bn_aggr(call: Call, dst: NkiTensor, data: NkiTensor) -> None:
    """Mean and variance from the results of `bn_stats`."""
    call.need(data.free_size % 3 == 0, "data", "a multiple of 3 elements", data.free_size)
    call.need(dst.free_size == 2, "dst", "2 elements a partition", dst.shape)
    count, mean, spread = np.moveaxis(rows(call.read32("data", data)).reshape(data.shape[0], -1, 3), 2, 0)
    total = count.sum(axis=1, keepdims=True)
    center = (count * mean).sum(axis=1, keepdims=True) / total
    variance = (spread + count * np.square(mean - center)).sum(axis=1, keepdims=True) / total
    call.write("dst", dst, shaped(np.concatenate((center, variance), axis=1), dst))
