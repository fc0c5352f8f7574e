"""One rank's safetensors file, preallocated, filled by positioned writes and taken up again after a kill."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from kimi_k2.checkpoint.writer import PARTIAL_SUFFIX, encode_header
from kimi_k2.errors import CheckpointError
from kimi_k2.quantization.stored import TensorSpec

_AT_ONCE = os.sysconf("SC_IOV_MAX")
RESUME = "what is finished is kept; make room or mend the disk and run the same command again"


class RankFile:
    """`<path>.partial` until `finish`, `path` afterwards.

    Unlike `SafetensorsWriter` it keeps an unfinished file and opens it again without truncating it; who writes decides
    what of it is valid.

    Args:
        resume: take up the file that is there; otherwise it is made anew.

    Raises:
        CheckpointError: the disk is full, the file cannot be written, or it is gone or of another size on resuming.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], *, resume: bool) -> None:
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self.specs = {spec.name: spec for spec in specs}
        prefix, self._offsets = encode_header(self.specs.values())
        self.nbytes = len(prefix) + sum(spec.nbytes for spec in self.specs.values())
        self.finished = resume and path.exists() and not self.partial.exists()
        target = path if self.finished else self.partial
        flags = os.O_RDWR if resume else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            self._fd = os.open(target, flags, 0o644)
        except OSError as error:
            raise CheckpointError(f"cannot be opened: {error.strerror}", file=target) from error
        if resume:
            size = os.fstat(self._fd).st_size
            if size != self.nbytes:
                raise CheckpointError(
                    f"expected {self.nbytes} bytes, got {size}; delete the output directory", file=target
                )
            return
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
            self._pwrite([memoryview(prefix)], 0)
        except OSError as error:
            os.close(self._fd)
            self.partial.unlink(missing_ok=True)
            raise CheckpointError(
                f"cannot reserve {self.nbytes} bytes: {error.strerror}; {RESUME}", file=self.path
            ) from error

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> int:
        """Write pieces after each other from byte `offset` within a tensor; how many bytes they are."""
        count = sum(len(piece) for piece in pieces)
        assert offset + count <= self.specs[name].nbytes
        position = self._offsets[name] + offset
        try:
            for first in range(0, len(pieces), _AT_ONCE):
                position = self._pwrite(pieces[first : first + _AT_ONCE], position)
        except OSError as error:
            raise CheckpointError(
                f"cannot be written: {error.strerror}; {RESUME}", file=self.partial, tensor=name
            ) from error
        return count

    def _pwrite(self, pieces: Sequence[memoryview], position: int) -> int:
        """The position after the last piece."""
        left = list(pieces)
        while left:
            written = os.pwritev(self._fd, left, position)
            position += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]
        return position

    def sync(self) -> None:
        """Flush data to the disk and drop it from the page cache, where a terabyte would crowd everything else out."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise CheckpointError(f"cannot be flushed: {error.strerror}; {RESUME}", file=self.partial) from error
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Give the file its final name."""
        if not self.finished:
            self.sync()
            self.partial.replace(self.path)
            self.finished = True

    def close(self) -> None:
        """Close without renaming."""
        os.close(self._fd)
