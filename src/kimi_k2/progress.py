"""One progress bar for everything that reads or writes many bytes: bytes, rate, time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kimi_k2.terminal import new_console

# A bar that flashes by tells nobody anything.
DELAY_SECONDS = 2.0


class ByteProgress:
    """A bar on standard error that appears after two seconds, and never when that is no terminal.

    Args:
        description: what is being done, in a word or two.
        total: bytes in all; None if unknown.
    """

    def __init__(self, description: str, total: int | None) -> None:
        self.description, self.total = description, total
        self.done = 0
        self._start = time.monotonic()
        self._bar: Progress | None = None
        self._quiet = not sys.stderr.isatty()

    def advance(self, count: int) -> None:
        """Count `count` more bytes as done."""
        self.done += count
        if self._quiet:
            return
        if self._bar is None:
            if time.monotonic() - self._start < DELAY_SECONDS:
                return
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=new_console(stderr=True),
            )
            self._bar.start()
            self._bar.add_task(self.description, total=self.total)
        self._bar.update(self._bar.task_ids[0], completed=self.done)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
