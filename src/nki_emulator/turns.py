"""Turns of cores that are emulated as threads: one runs at a time, so that a run is the same every time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Turns:
    """Whose turn it is among `count` cores; a core keeps its turn until it waits or ends.

    Attributes:
        failure: what has ended a core; the others then end too.
    """

    def __init__(self, count: int) -> None:
        self.failure: BaseException | None = None
        self._wakes = [threading.Semaphore(0) for _ in range(count)]
        self._ready: list[Callable[[], bool] | None] = [None] * count
        self._ended = [False] * count
        self._came: dict[tuple[Any, ...], int] = {}
        self._brought: dict[tuple[Any, ...], dict[int, Any]] = {}

    def begin(self) -> None:
        """Give the first core its turn."""
        self._wakes[0].release()

    def enter(self, core: int) -> None:
        """Wait for a core's first turn."""
        self._wakes[core].acquire()

    def wait(self, core: int, ready: Callable[[], bool]) -> bool:
        """Let others run until `ready()`; False where a failure or a deadlock ends the wait."""
        if ready():
            return True
        self._ready[core] = ready
        following = self._next(core)
        if following is None:
            self._ready[core] = None
            return False
        self._wakes[following].release()
        self._wakes[core].acquire()
        self._ready[core] = None
        return self.failure is None and ready()

    def end(self, core: int) -> None:
        """Give the turn away for good; where all that are left wait in vain, to one of them."""
        self._ended[core] = True
        following = self._next(core)
        if following is None:
            following = next((other for other, ended in enumerate(self._ended) if not ended), None)
        if following is not None:
            self._wakes[following].release()

    def meet(self, core: int, key: tuple[Any, ...], member: int, count: int, mine: Any) -> dict[int, Any] | None:
        """What `count` members bring to the same meeting, in the order in which they came; None where one never comes.

        Args:
            core: which waits.
            key: of the meeting; a member's next one of the same key is another.
            member: who comes.
            count: of members.
            mine: what this one brings.
        """
        number = self._came[(member, *key)] = self._came.get((member, *key), 0) + 1
        brought = self._brought.setdefault((number, *key), {})
        brought[member] = mine
        return brought if self.wait(core, lambda: len(brought) == count) else None

    def has_ended(self, core: int) -> bool:
        """Whether a core has come to its end."""
        return self._ended[core]

    def _next(self, core: int) -> int | None:
        count = len(self._wakes)
        for step in range(1, count + 1):
            other = (core + step) % count
            ready = self._ready[other]
            if not self._ended[other] and (ready is None or self.failure is not None or ready()):
                # A core that asks is not ready: it stands here as waiting.
                return other
        return None
