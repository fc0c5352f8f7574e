"""Files on their way to the disk, in a thread of its own, while the next tensors are converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from kimi_k2.sharding.rank_file import RankFile

# The disk starts early: with the operating system's own patience a layer would wait in memory until its end.
_AT_ONCE = 2**28


class Flusher:
    """Makes files durable, never more than one layer behind.

    Args:
        files: written by others meanwhile.

    Raises:
        CheckpointError: (from any method) an earlier flush failed.
    """

    def __init__(self, files: Sequence[RankFile]) -> None:
        self._files = files
        self._pool = ThreadPoolExecutor(1)
        self._unsent = 0
        self._early: Future[None] | None = None
        self._layer: Future[None] | None = None

    def wrote(self, count: int) -> None:
        """So many more bytes were handed to the operating system."""
        self._unsent += count
        if self._unsent >= _AT_ONCE and (self._early is None or self._early.done()):
            self._wait(self._early)
            self._unsent = 0
            self._early = self._pool.submit(self._sync)

    def end_layer(self, then: Callable[[], None]) -> None:
        """Flush all that was written, then call `then`; waits until the layer before has come so far."""
        self.wait()

        def flush() -> None:
            self._sync()
            then()

        self._unsent = 0
        self._layer = self._pool.submit(flush)

    def wait(self) -> None:
        """Until everything is done."""
        self._wait(self._early)
        self._wait(self._layer)

    @staticmethod
    def _wait(job: Future[None] | None) -> None:
        if job is not None:
            job.result()

    def _sync(self) -> None:
        for file in self._files:
            file.sync()

    def __enter__(self) -> Flusher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
