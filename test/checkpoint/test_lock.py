"""The lock of a directory, where another process removes the file between its opening and its locking."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from kimi_k2.errors import CheckpointError
from kimi_k2.files import LOCK, DirectoryLock


def test_a_file_that_its_holder_removed_in_between_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lock would be of a file that is gone, beside which a third process makes its own."""
    locked: list[int] = []
    flock = fcntl.flock

    def removed_first(fd: int, operation: int) -> None:
        if not locked:
            (tmp_path / LOCK).unlink()
        locked.append(fd)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with DirectoryLock(tmp_path):
        assert len(locked) == 2
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
        with pytest.raises(CheckpointError, match=f"another process is writing here: process {os.getpid()} on"):
            DirectoryLock(tmp_path).__enter__()
    assert not (tmp_path / LOCK).exists()
