"""Collectives in kernels, on several emulated ranks of one and two cores, against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_emulator import errors
from nki_emulator.ranks import run_as_rank, run_on_ranks

RELEASE = None  # kernels that show what the emulator takes

RANKS = 4


@nki.jit
def in_sbuf(data: Any, form: str, groups: Any) -> Any:
    """Each core has a half of the columns."""
    cores, core = nl.num_programs(), nl.program_id()
    rows, columns = data.shape
    group = ncc.ReplicaGroup(groups)
    each = columns // cores
    count = len(groups[0])
    mine = slice(core * each, (core + 1) * each)
    src = nl.ndarray((rows, each), dtype=data.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=src, src=data[:, mine])
    grown = each * count if form == "gather" else each
    dst = nl.ndarray((rows, grown), dtype=data.dtype, buffer=nl.sbuf)
    if form == "reduce":
        ncc.all_reduce(srcs=[src], dsts=[dst], replica_group=group, op=nl.add)
    else:
        ncc.all_gather(srcs=[src], dsts=[dst], replica_group=group, collective_dim=1)
    out = nl.ndarray((dst.shape[0], cores, grown), dtype=data.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[:, core], src=dst)
    return out


@nki.jit
def in_hbm(data: Any, form: str, groups: Any, barrier: bool = True) -> Any:
    """Core 0 brings the input, core 1 takes the output; the rank picks a row by its number."""
    count = len(groups[0])
    where = nl.shared_hbm if nl.num_programs() > 1 else nl.private_hbm
    src = nl.ndarray(data.shape, dtype=data.dtype, buffer=where)
    grown = (data.shape[0] * count, data.shape[1]) if form == "gather" else data.shape
    dst = nl.ndarray(grown, dtype=data.dtype, buffer=where)
    out = nl.ndarray(grown, dtype=data.dtype, buffer=nl.shared_hbm)
    row = nl.ndarray((1, data.shape[1]), dtype=data.dtype, buffer=nl.shared_hbm)
    if nl.program_id() == 0:
        nisa.dma_copy(dst=src, src=data)
    if nl.num_programs() > 1 and barrier:
        nisa.core_barrier(src, (0, 1))
    group = ncc.ReplicaGroup(groups)
    if form == "gather":
        ncc.all_gather(srcs=[src], dsts=[dst], replica_group=group, collective_dim=0)
    else:
        ncc.all_to_all(srcs=[src], dsts=[dst], replica_group=group, collective_dim=0)
    if nl.program_id() == nl.num_programs() - 1:
        nisa.dma_copy(dst=out, src=dst)
        nisa.dma_copy(dst=row, src=data.select(0, ncc.rank_id()))
    return out, row


def _drawn(rows: int = 8, columns: int = 6) -> list[Any]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((rows, columns)).astype(np.float32) for _ in range(RANKS)]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 2], [3, 1]]])
def test_collectives_over_sbuf(cores: int, groups: list[list[int]]) -> None:
    data = _drawn()
    for form in ("reduce", "gather"):
        found = run_on_ranks(in_sbuf[cores], [(array, form, groups) for array in data])
        for rank, out in enumerate(found):
            group = next(group for group in groups if rank in group)
            shares = [data[other].reshape(8, cores, -1) for other in group]
            wanted = {
                "reduce": sum(shares[1:], shares[0]),
                "gather": np.concatenate(shares, axis=2),
            }[form]
            np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("cores", [1, 2])
def test_collectives_over_hbm(cores: int) -> None:
    data, groups = _drawn(), [[1, 0], [2, 3]]
    for form in ("gather", "exchange"):
        found = run_on_ranks(in_hbm[cores], [(array, form, groups) for array in data])
        for rank, (out, row) in enumerate(found):
            group = next(group for group in groups if rank in group)
            pieces = [
                data[other] if form == "gather" else np.split(data[other], 2)[group.index(rank)] for other in group
            ]
            np.testing.assert_array_equal(out, np.concatenate(pieces))
            np.testing.assert_array_equal(row[0], data[rank][rank])


def test_a_rank_that_does_not_come_is_a_deadlock() -> None:
    data = _drawn()
    with pytest.raises(errors.DeadlockError, match="all ranks of the group"):
        run_on_ranks(
            in_sbuf[2],
            [(array, "gather" if rank == 3 else "reduce", [[0, 1, 2, 3]]) for rank, array in enumerate(data)],
        )


def test_a_collective_over_hbm_needs_the_other_core_to_be_done() -> None:
    with pytest.raises(errors.RaceError):
        run_on_ranks(in_hbm[2], [(array, "gather", [[0, 1, 2, 3]], False) for array in _drawn()])


def _sum(source: Any, target: Any, ranks: tuple[int, ...] = (0,), op: Any = nl.add) -> None:
    ncc.all_reduce(srcs=[source], dsts=[target], replica_group=ncc.ReplicaGroup([ranks]), op=op)


ALONE = {"replica_group": ncc.ReplicaGroup([[0]])}
# What is done with the argument and two tiles in SBUF, and what is said.
WRONG: dict[str, tuple[Callable[[Any, Any, Any], None], str]] = {
    "argument": (lambda data, one, other: _sum(data, data), "srcs: a tensor made in the kernel"),
    "op": (lambda data, one, other: _sum(one, other, op=nl.multiply), "op: nl.add"),
    "mixed": (lambda data, one, other: _sum(one, data), "dsts: in sbuf"),
    "two": (
        lambda data, one, other: ncc.all_reduce([one, one], [other, other], **ALONE, op=nl.add),
        "srcs: one tensor in SBUF",
    ),
    "dim": (
        lambda data, one, other: ncc.all_gather([one], [other], **ALONE, collective_dim=2), "collective_dim: 0 or 1",
    ),
    "place": (lambda data, one, other: ncc.all_to_all([one], [other], **ALONE, collective_dim=0), "srcs: in HBM"),
    "group": (lambda data, one, other: _sum(one, other, (1,)), "groups: rank 0 in one list"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_collectives_name_their_operand(name: str) -> None:
    wrong, message = WRONG[name]

    @nki.jit
    def kernel(data: Any) -> Any:
        wrong(data, nl.load(data), nl.ndarray(data.shape, dtype=data.dtype, buffer=nl.sbuf))
        return data

    with pytest.raises(errors.NkiError, match=message):
        kernel(_drawn()[0])


def test_processes_that_come_to_different_collectives() -> None:
    def gather(group: Sequence[int], mine: Any) -> list[Any]:
        return [mine, (("nki.collectives.all_gather",), mine[1])]

    with pytest.raises(errors.DeadlockError, match="rank 3 comes to the same"):
        run_as_rank(in_sbuf[1], 2, gather, (_drawn()[0], "reduce", [[2, 3]]))
