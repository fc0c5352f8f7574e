"""Ranks that run a kernel together, and what they bring to collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nki_emulator.errors import DeadlockError
from nki_emulator.turns import Turns

# Given ranks and what this one brings, what each of them brings.
Gather = Callable[[Sequence[int], Any], list[Any]]


class Ranks:
    """The ranks of one run.

    Args:
        count: of ranks.
        cores: of each.
    """

    def __init__(self, count: int, cores: int) -> None:
        self.count, self.cores = count, cores
        self.turns = Turns(count * cores)

    def place(self, rank: int, core: int) -> int:
        """A core's number among all whose turns these are."""
        return rank * self.cores + core

    def exchange(
        self, rank: int, lane: int, core: int, key: tuple[Any, ...], group: Sequence[int], mine: Any
    ) -> list[Any] | None:
        """What each rank of the group brings to the same collective, in the group's order; None where one never comes.

        Args:
            rank: who calls.
            lane: the core whose collectives these are.
            core: which waits.
            key: what must agree between them.
            group: ranks.
            mine: what this one brings.
        """
        meeting = (lane, tuple(group), *key)
        brought = self.turns.meet(self.place(rank, core), meeting, rank, len(group), mine)
        return None if brought is None else [brought[other] for other in group]


class RankOfProcess(Ranks):
    """One rank whose others are processes of their own.

    Cores take turns in the same order on every rank, so that all come to their collectives in one order.

    Args:
        cores: of each rank.
        gather: collects what the ranks of a group bring, in their order; all of them call it.
    """

    def __init__(self, cores: int, gather: Gather) -> None:
        super().__init__(1, cores)
        self._gather = gather

    def place(self, rank: int, core: int) -> int:
        """The core's number."""
        return core

    def exchange(
        self, rank: int, lane: int, core: int, key: tuple[Any, ...], group: Sequence[int], mine: Any
    ) -> list[Any] | None:
        """As that of `Ranks`.

        Raises:
            DeadlockError: the ranks come to different collectives.
        """
        gathered = self._gather(group, ((lane, *key), mine))
        for other, (theirs, _) in zip(group, gathered, strict=True):
            if theirs != (lane, *key):
                raise DeadlockError(str(key[0]), "replica_group", f"rank {other} comes to the same", theirs)
        return [brought for _, brought in gathered]


def run_as_rank(
    kernel: Any, rank: int, gather: Gather, arguments: Sequence[Any], named: Mapping[str, Any] | None = None
) -> Any:
    """Run a kernel as one of several ranks that are processes of their own; arguments as a call of it.

    Args:
        kernel: of `nki.jit`, `kernel[2]` for two cores.
        rank: this one's number.
        gather: see `RankOfProcess`.
        arguments: positional ones.
        named: the others.
    """
    return kernel.run(RankOfProcess(kernel.cores, gather), {rank: arguments}, named or {})[0]


def run_on_ranks(kernel: Any, arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Run a kernel on several ranks at once, each with its own arguments.

    Args:
        kernel: of `nki.jit`, `kernel[2]` for two cores a rank; `last` is rank 0's launch afterwards.
        arguments: positional ones of each rank.

    Returns:
        The results of each rank.
    """
    rank_results: list[Any] = kernel.run(Ranks(len(arguments), kernel.cores), dict(enumerate(arguments)), {})
    return rank_results
