"""One rank's safetensors file, preallocated, filled by positioned writes and taken up again after a kill."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from kimi_k2.checkpoint.index import encode_header
from kimi_k2.errors import CheckpointError, CorruptHeaderError
from kimi_k2.files import PARTIAL_SUFFIX, errors_of, open_output, open_regular
from kimi_k2.quantization.stored import TensorSpec

_AT_ONCE = os.sysconf("SC_IOV_MAX")
_CHUNK = 2**22
MEND = "`kimi-k2 convert --verify-output` from the same checkpoint makes it again"
RESUME = "what is finished is kept; make room or mend the disk and run the same command again"


# Ten times as fast as SHA-256, which took a fifth of a conversion's time.
CHECKSUM = "xxh3_128"
# What manifests and journals hold that do not name their checksum.
FIRST_CHECKSUM = "sha256"


class Digest(Protocol):
    """A running checksum."""

    def update(self, data: memoryview | bytes, /) -> None:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """Of all bytes so far."""


MakeDigest = Callable[[], Digest]
_KINDS: dict[str, MakeDigest] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}


def digest_maker(kind: str, file: Path) -> MakeDigest:
    """What makes checksums of that kind.

    Args:
        kind: its name in a manifest or journal.
        file: where it stands.

    Raises:
        CorruptHeaderError: no such kind is known.
    """
    if str(kind) not in _KINDS:  # a damaged file may hold anything
        raise CorruptHeaderError(f"checksum: expected {' or '.join(_KINDS)}, got {kind!r}", file=file)
    return _KINDS[kind]


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
        with errors_of(self.path if self.finished else self.partial, "read"):
            while position < end:
                chunk = os.pread(self._fd, min(_CHUNK, end - position), position)
                if not chunk:  # somebody cut the file short meanwhile
                    break
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
        with errors_of(self.partial, "flushed", f"; {RESUME}"):
            os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Give the file its final name."""
        if not self.finished:
            self.sync()
            with errors_of(self.partial, "renamed", f"; {RESUME}"):
                self.partial.replace(self.path)
            self.finished = True

    def close(self, *, discard: bool = False) -> None:
        """Close without renaming; `discard` gives back the space of a file in which nothing is valid yet."""
        os.close(self._fd)
        if discard and self.fresh:
            self.partial.unlink(missing_ok=True)
