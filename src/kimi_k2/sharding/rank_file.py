"""One rank's safetensors file, preallocated, filled by positioned writes and taken up again after a kill.

`Flusher` brings such files to the disk in a thread of its own, while the next tensors are converted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kimi_k2.checkpoint.index import encode_header
from kimi_k2.errors import CheckpointError
from kimi_k2.files import PARTIAL_SUFFIX, open_output, open_regular
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding.checksum import MakeDigest

_AT_ONCE = os.sysconf("SC_IOV_MAX")
_CHUNK = 2**22
# The disk starts early: with the operating system's own patience a layer would wait in memory until its end.
_EARLY = 2**28
MEND = "`kimi-k2 convert --verify-output` from the same checkpoint makes it again"
RESUME = "what is finished is kept; make room or mend the disk and run the same command again"


@dataclass(frozen=True)
class FileLayout:
    """What all ranks' files have in common.

    Attributes:
        specs: tensors by name, in the order of the file.
        prefix: the file's first bytes: length and header.
        offsets: where each tensor begins in the file.
    """

    specs: dict[str, TensorSpec]
    prefix: bytes
    offsets: dict[str, int]

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> FileLayout:
        """The layout of a file with these tensors."""
        by_name = {spec.name: spec for spec in specs}
        return cls(by_name, *encode_header(by_name.values()))

    @property
    def nbytes(self) -> int:
        """Size of a file."""
        return len(self.prefix) + sum(spec.nbytes for spec in self.specs.values())

    def is_whole(self, path: Path) -> bool:
        """Whether a file is there with this size and header; what the tensors hold is not looked at."""
        try:
            with open_regular(path) as file:
                return os.fstat(file.fileno()).st_size == self.nbytes and file.read(len(self.prefix)) == self.prefix
        except OSError:
            return False


class RankFile:
    """`<path>.partial` until `finish`, `path` afterwards.

    Unlike `SafetensorsWriter` it keeps an unfinished file and opens it again without truncating it; who writes decides
    what of it is valid.

    Args:
        resume: take up the file that is there, finished or not; otherwise it is made anew.

    Attributes:
        fresh: nothing of it is valid yet: it was made now, or what was there had another size or header.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """

    def __init__(self, path: Path, layout: FileLayout, *, resume: bool) -> None:
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self.layout, self.nbytes = layout, layout.nbytes
        self.finished = resume and layout.is_whole(path) and not self.partial.exists()
        self.fresh = False
        try:
            if self.finished:
                self._fd = open_output(path)
                return
            if path.exists():
                path.replace(self.partial)
            self.fresh = not (resume and self.partial.exists() and self.partial.stat().st_size == self.nbytes)
            self._fd = open_output(self.partial, truncate=self.fresh)
        except OSError as error:
            raise CheckpointError(f"cannot be opened: {error.strerror}", file=self.partial) from error
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
            self._pwrite([memoryview(layout.prefix)], 0)
        except OSError as error:
            os.close(self._fd)
            if self.fresh:
                self.partial.unlink(missing_ok=True)
            raise CheckpointError(
                f"cannot reserve {self.nbytes} bytes: {error.strerror}; {RESUME}", file=self.path
            ) from error

    def checksum(self, name: str, make: MakeDigest) -> str:
        """Checksum of a tensor's bytes as they are on the disk."""
        digest, position = make(), self.layout.offsets[name]
        end = position + self.layout.specs[name].nbytes
        while position < end:
            chunk = os.pread(self._fd, min(_CHUNK, end - position), position)
            digest.update(chunk)
            position += len(chunk)
        return digest.hexdigest()

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> int:
        """Write pieces after each other from byte `offset` within a tensor; how many bytes they are."""
        count = sum(len(piece) for piece in pieces)
        assert offset + count <= self.layout.specs[name].nbytes
        if self.finished:
            # A damaged tensor of a finished file is mended in place; until then it is not under its final name.
            self._unfinish()
        position = self.layout.offsets[name] + offset
        try:
            for first in range(0, len(pieces), _AT_ONCE):
                position = self._pwrite(pieces[first : first + _AT_ONCE], position)
        except OSError as error:
            raise CheckpointError(
                f"cannot be written: {error.strerror}; {RESUME}", file=self.partial, tensor=name
            ) from error
        return count

    def _unfinish(self) -> None:
        self.path.replace(self.partial)
        self.finished = False

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

    def close(self, *, discard: bool = False) -> None:
        """Close without renaming; `discard` gives back the space of a file in which nothing is valid yet."""
        os.close(self._fd)
        if discard and self.fresh:
            self.partial.unlink(missing_ok=True)


class Flusher:
    """Makes files durable, never more than one layer behind.

    Args:
        files: written by others meanwhile.

    Raises:
        CheckpointError: (from any method) an earlier flush failed.
    """

    def __init__(self, files: Sequence[RankFile]) -> None:
        self._files = files
        self._pool, self._unsent = ThreadPoolExecutor(1), 0
        self._early: Future[None] | None = None
        self._layer: Future[None] | None = None

    def wrote(self, count: int) -> None:
        """So many more bytes were handed to the operating system."""
        self._unsent += count
        if self._unsent >= _EARLY and (self._early is None or self._early.done()):
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

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
