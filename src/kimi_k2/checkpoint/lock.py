"""One writer a directory: an exclusive lock that the kernel takes back when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from kimi_k2.errors import CheckpointError
from kimi_k2.files import open_output

LOCK = ".kimi-k2.lock"


class DirectoryLock:
    """Held from `__enter__` to `__exit__`; the file names its holder and is removed at the end.

    Raises:
        CheckpointError: another process holds it (which, and since when), or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK
        self._fd = -1

    def __enter__(self) -> DirectoryLock:
        while True:
            try:
                self._fd = open_output(self.path)
            except OSError as error:
                raise CheckpointError(f"cannot be written: {error.strerror}", file=self.path) from None
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = self._holder()
                os.close(self._fd)
                raise CheckpointError(f"another process is writing here: {holder}", file=self.path.parent) from None
            if self._is_current():
                break
            os.close(self._fd)  # its holder removed it in between
        mine = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(mine).encode(), 0)
        return self

    def _is_current(self) -> bool:
        try:
            return self.path.stat().st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        try:
            held = json.loads(os.pread(self._fd, 4096, 0))
            return f"process {held['process']} on {held['host']} since {held['since']}"
        except (ValueError, KeyError, TypeError):
            return "it has not given its name yet"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
