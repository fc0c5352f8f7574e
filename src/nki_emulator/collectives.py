"""`nki.collectives`: all-reduce, all-gather and all-to-all between emulated ranks.

Contract: aws-neuron-sdk `nki/api/nki/collectives/__init__.py` (NKI 0.7.0). Tensors lie all in HBM or all in SBUF. In
SBUF each core of LNC=2 exchanges its own tile with the same core of the other ranks; in HBM both cores call, and it is
one collective (README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_emulator.access import Call, box
from nki_emulator.core import current
from nki_emulator.dtypes import Array
from nki_emulator.errors import DeadlockError, DtypeError, NkiError, PlaceError
from nki_emulator.language import NKIObject
from nki_emulator.ops import Operator
from nki_emulator.registers import VirtualRegister
from nki_emulator.storage import Region
from nki_emulator.tensor import NkiTensor

_REDUCTIONS = ("add", "minimum", "maximum")
_Combine = Callable[[list[Array], int], Array]


class ReplicaGroup(NKIObject):
    """Lists of ranks; each list exchanges by itself.

    Args:
        groups: ranks of each list, none in two.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [[int(rank) for rank in group] for group in groups]

    def of(self, rank: int) -> list[int]:
        """The list that a rank is in."""
        own_groups = [group for group in self.groups if rank in group]
        if len(own_groups) != 1:
            raise NkiError("nki.collectives.ReplicaGroup", "groups", f"rank {rank} in one list", self.groups)
        return own_groups[0]


def rank_id(name: str | None = None) -> VirtualRegister:
    """This rank's number, in a register."""
    return VirtualRegister(current().launch.rank)


def all_reduce(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Sum, minimum or maximum over the group, in float32 and in the order of its ranks."""
    call = Call("all_reduce", "collective", "nki.collectives.")
    if not isinstance(op, Operator) or op.name not in _REDUCTIONS:
        raise call.fail("op", "nl.add, nl.minimum or nl.maximum", op, NkiError)
    _run(call, srcs, dsts, replica_group, lambda size: size, lambda arrays, _: _reduce(op, arrays))


def all_gather(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """The group's tensors one after the other along a dimension: 0 in HBM, 0 or 1 in SBUF."""
    call = Call("all_gather", "collective", "nki.collectives.")
    _need_dim(call, collective_dim, (0, 1) if srcs[0].buffer is Region.sbuf else (0,))
    count = len(replica_group.of(call.core.launch.rank))
    _run(
        call, srcs, dsts, replica_group, lambda size: size * count,
        lambda parts, _: np.concatenate(parts, collective_dim),
    )  # fmt: skip


def all_to_all(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Piece i along dimension 0 goes to rank i of the group; in HBM alone."""
    call = Call("all_to_all", "collective", "nki.collectives.")
    _need_dim(call, collective_dim, (0,))
    for tensor in (*srcs, *dsts):
        if tensor.buffer.on_chip:
            raise call.fail("srcs", "in HBM", tensor.buffer.value, PlaceError)
    count = len(replica_group.of(call.core.launch.rank))
    call.need(srcs[0].shape[0] % count == 0, "srcs", f"a multiple of {count} in dimension 0", srcs[0].shape)
    _run(
        call, srcs, dsts, replica_group, lambda size: size,
        lambda arrays, rank: np.concatenate([np.split(array, count)[rank] for array in arrays]),
    )  # fmt: skip


def _reduce(reduction: Operator, arrays: list[Array]) -> Array:
    total = arrays[0]
    assert reduction.alu is not None
    for array in arrays[1:]:
        total = reduction.alu(total, array)
    return np.asarray(total)


def _need_dim(call: Call, dim: int, allowed: tuple[int, ...]) -> None:
    if dim not in allowed:
        raise call.fail("collective_dim", " or ".join(map(str, allowed)), dim, NkiError)


def _run(
    call: Call,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    groups: ReplicaGroup,
    grown: Callable[[int], int],
    combine: _Combine,
) -> None:
    call.need(bool(srcs) and len(srcs) == len(dsts), "dsts", f"{len(srcs)} tensors, as srcs", len(dsts))
    in_sbuf = srcs[0].buffer is Region.sbuf
    if in_sbuf:
        call.need(len(srcs) == 1, "srcs", "one tensor in SBUF", len(srcs))
    for operand, tensors in (("srcs", srcs), ("dsts", dsts)):
        for tensor in tensors:
            _check(call, operand, tensor, in_sbuf)
    for src, dst in zip(srcs, dsts, strict=True):
        if src.dtype != dst.dtype:
            raise call.fail("dsts", f"dtype {src.dtype} of srcs", dst.dtype, DtypeError)
        call.need(dst.size == grown(src.size), "dsts", f"{grown(src.size)} elements", dst.shape)
    if in_sbuf or call.core.launch.cores == 1:
        _exchange(call, srcs, dsts, groups, combine)
        return
    # In HBM it is one collective of both cores, which both wait for.
    _, last = call.core.launch.meet((call.operation,))
    if last:
        _exchange(call, srcs, dsts, groups, combine)
        for tensor in (*srcs, *dsts):
            tensor.storage.touched.clear()
    else:
        call.instruction.accesses += [box(src, src.offset, "srcs", False) for src in srcs]
        call.instruction.accesses += [box(dst, dst.offset, "dsts", True) for dst in dsts]
    call.core.launch.meet((call.operation,))


def _check(call: Call, operand: str, tensor: NkiTensor, in_sbuf: bool) -> None:
    if in_sbuf:
        call.tile(operand, tensor)
        call.need_region(operand, tensor, Region.sbuf)
        call.need(tensor.ndim == 2, operand, "two dimensions in SBUF", tensor.shape)
        return
    call.need_region(operand, tensor, Region.shared_hbm if call.core.launch.cores > 1 else Region.private_hbm)
    if tensor.name == "argument":
        raise call.fail(operand, "a tensor made in the kernel: a collective cannot reach an argument", kind=PlaceError)


def _exchange(
    call: Call, srcs: list[NkiTensor], dsts: list[NkiTensor], groups: ReplicaGroup, combine: _Combine
) -> None:
    launch = call.core.launch
    group = groups.of(launch.rank)
    mine = [np.array(call.read("srcs", src)) for src in srcs]
    key = (call.operation, *((src.shape, src.dtype) for src in srcs))
    # Both cores of HBM's collective are one: the first names it.
    core = call.core.number if srcs[0].buffer is Region.sbuf else 0
    brought = launch.ranks.exchange(launch.rank, core, call.core.number, key, group, mine)
    if brought is None:
        raise DeadlockError(call.operation, "replica_group", "all ranks of the group come to the same", group)
    for number, dst in enumerate(dsts):
        arrays = [tensors[number] for tensors in brought]
        exact = call.operation.endswith(("all_gather", "all_to_all"))
        values = combine(
            arrays if exact else [array.astype(np.float32, copy=False) for array in arrays], group.index(launch.rank)
        )
        call.write("dsts", dst, values.reshape(dst.shape))
