"""Ranks that run a kernel together, and what they bring to collectives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kimi_k2.nki.turns import Turns


class Ranks:
    """The ranks of one run.

    Args:
        count: of ranks.
        cores: of each.
    """

    def __init__(self, count: int, cores: int) -> None:
        self.count, self.cores = count, cores
        self.turns = Turns(count * cores)
        self._brought: dict[tuple[Any, ...], dict[int, Any]] = {}
        self._calls: dict[tuple[Any, ...], int] = {}

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
        calls = self._calls.setdefault((rank, lane, *key), 0)
        self._calls[(rank, lane, *key)] = calls + 1
        brought = self._brought.setdefault((lane, calls, tuple(group), *key), {})
        brought[rank] = mine
        if not self.turns.wait(rank * self.cores + core, lambda: len(brought) == len(group)):
            return None
        return [brought[other] for other in group]


def run_on_ranks(kernel: Any, arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Run a kernel on several ranks at once, each with its own arguments.

    Args:
        kernel: of `nki.jit`, `kernel[2]` for two cores a rank; `last` is rank 0's launch afterwards.
        arguments: positional ones of each rank.

    Returns:
        The results of each rank.
    """
    ranks = Ranks(len(arguments), kernel.cores)
    begun = [kernel.begin(ranks, rank, mine, {}) for rank, mine in enumerate(arguments)]
    threads: list[threading.Thread] = [thread for launch, *_ in begun for thread in launch.threads]
    ranks.turns.begin()
    for thread in threads:
        thread.join()
    kernel.last = begun[0][0]
    return [kernel.end(*one) for one in begun]
