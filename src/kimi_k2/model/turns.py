"""Whose turn a model is: one generation at a time, the others wait in the order in which they came.

An open stream holds the model, not the thread that opened it: web frameworks run each `next` on any thread of a pool.
Nothing here schedules: many users at once is what a serving engine is for.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kimi_k2.errors import BusyError, GenerationError

T = TypeVar("T")

# Seconds that a caller waits if it does not say how long.
TIMEOUT = 300.0
# After so many, streams are looked for that nobody can reach: where all threads wait, nothing else collects them.
PATIENCE = 1.0
_HOW = "close its stream (`stream.close()`), or serve several callers at once with `kimi-k2 serve`"


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class _Turn:
    """A caller's place in the queue.

    A stream that is garbage ends in whatever thread collects it, between any two instructions: an end takes no lock
    and calls no Python of others.

    Attributes:
        before: who must have ended first; None once that has happened. One who gave up leaves it to the next.
        thread: that advanced the stream last.
        ended: it is over, or was given up.
        over: held until then.
    """

    before: _Turn | None = None
    thread: threading.Thread | None = field(default_factory=threading.current_thread)
    ended: bool = False
    over: threading.Lock = field(default_factory=_locked)

    def awaited(self, until: float) -> bool:
        """Whether it has ended by this time of the monotonic clock."""
        first = min(PATIENCE, max(0.0, until - time.monotonic()))
        if self.over.acquire(timeout=first):
            return True
        gc.collect()
        return self.over.acquire(timeout=max(0.0, until - time.monotonic()))

    def end(self) -> None:
        self.thread, self.ended = None, True
        self.over.release()


class Turns:
    """The queue of a model. A copy of the model has its own."""

    def __init__(self) -> None:
        self._joining = threading.Lock()
        self._last = self._holder = _Turn()
        self._last.end()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()

    @contextmanager
    def take(self, timeout: float = 0.0) -> Iterator[_Turn]:
        """Hold the model.

        Args:
            timeout: seconds to wait at most for those who came before.

        Raises:
            BusyError: they have not ended by then, or this thread advanced the open stream last: it would wait for
                itself.
            GenerationError: the timeout is no finite number of seconds.
        """
        checked_timeout(timeout)
        end = time.monotonic() + timeout
        self._refuse_own()
        turn = _Turn()
        try:
            with self._joining:
                turn.before, self._last = self._last, turn
            while (before := turn.before) is not None:
                if not before.ended and not before.awaited(end):
                    raise BusyError(f"another generation holds the model, after {timeout:g} s of waiting: {_HOW}")
                turn.before = before.before
            self._holder = turn
            yield turn
        finally:
            turn.end()

    def stream(self, begin: Callable[[], Iterable[T]], timeout: float) -> Generator[T, None, None]:
        """What `begin` makes; it begins, and holds the model, from the first `next` to the end or `close`.

        Raises:
            BusyError: (at the first `next`) see `take`.
        """
        with self.take(timeout) as turn:
            for item in begin():
                yield item
                turn.thread = threading.current_thread()

    def _refuse_own(self) -> None:
        if self._holder.thread is threading.current_thread():
            gc.collect()  # it may be a stream that nobody can reach
        if self._holder.thread is threading.current_thread():
            raise BusyError(f"this thread's own generation holds the model: {_HOW}")


def checked_timeout(timeout: float) -> float:
    """The seconds, if one can wait so long; else GenerationError."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise GenerationError(f"timeout: expected seconds from 0 to {threading.TIMEOUT_MAX:.0f}, got {timeout!r}")
    return timeout
