"""The ranks' safetensors files: preallocated, filled a layer at a time by positioned writes, taken up after a kill."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from kimi_k2.checkpoint.index import encode_header
from kimi_k2.checkpoint.writer import tensor_bytes
from kimi_k2.errors import CheckpointError, CorruptHeaderError, MissingTensorError
from kimi_k2.files import PARTIAL_SUFFIX, errors_of, open_output, open_regular
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding.convert import Part
from kimi_k2.sharding.layout import PlannedTensor

_AT_ONCE = os.sysconf("SC_IOV_MAX")
_CHUNK = 2**22
# Experts are written together until they have this size: small ones would cost a system call a rank each.
_GROUP_BYTES = 2**25
# The disk starts early: with the operating system's own patience a layer would wait in memory until its end.
_EARLY = 2**28
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
        nbytes: size of a file.
    """

    specs: dict[str, TensorSpec]
    prefix: bytes
    offsets: dict[str, int]
    nbytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> FileLayout:
        """The layout of a file with these tensors."""
        by_name = {spec.name: spec for spec in specs}
        prefix, offsets = encode_header(by_name.values())
        return cls(by_name, prefix, offsets, len(prefix) + sum(spec.nbytes for spec in by_name.values()))

    def is_whole(self, path: Path) -> bool:
        """Whether a file is there with this size and header; what the tensors hold is not looked at."""
        try:
            with open_regular(path) as file:
                return os.fstat(file.fileno()).st_size == self.nbytes and file.read(len(self.prefix)) == self.prefix
        except OSError:
            return False

    def checksum(
        self, descriptor: int, name: str, make: MakeDigest, on_bytes: Callable[[int], None] | None = None
    ) -> str:
        """Checksum of a tensor's bytes in an open file, or of fewer where it was cut short meanwhile."""
        digest, position = make(), self.offsets[name]
        end = position + self.specs[name].nbytes
        while position < end and (chunk := os.pread(descriptor, min(_CHUNK, end - position), position)):
            digest.update(chunk)
            position += len(chunk)
            if on_bytes:
                on_bytes(len(chunk))
        return digest.hexdigest()


class RankFile:
    """One file: `<path>.partial` until `finish`, `path` afterwards.

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
        self.path, self.layout = path, layout
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self.finished = resume and layout.is_whole(path) and not self.partial.exists()
        self.fresh = False
        try:
            if self.finished:
                self._fd = open_output(path)
                return
            if path.exists():
                path.replace(self.partial)
            self.fresh = not (resume and self.partial.exists() and self.partial.stat().st_size == layout.nbytes)
            self._fd = open_output(self.partial, truncate=self.fresh)
        except OSError as error:
            raise CheckpointError(f"cannot be opened: {error.strerror}", file=self.partial) from error
        try:
            os.posix_fallocate(self._fd, 0, layout.nbytes)
            self._pwrite([memoryview(layout.prefix)], 0)
        except OSError as error:
            self.close(discard=True)
            raise CheckpointError(
                f"cannot reserve {layout.nbytes} bytes: {error.strerror}; {RESUME}", file=self.path
            ) from error

    def holds(self, checksums: dict[str, str], make: MakeDigest) -> bool:
        """Whether the tensors on the disk have these checksums."""
        with errors_of(self.path if self.finished else self.partial, "read"):
            return not self.fresh and all(
                self.layout.checksum(self._fd, name, make) == digest for name, digest in checksums.items()
            )

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> int:
        """Write pieces after each other from byte `offset` within a tensor; how many bytes they are."""
        count = sum(map(len, pieces))
        assert offset + count <= self.layout.specs[name].nbytes
        if self.finished:
            # A damaged tensor of a finished file is mended in place; until then it is not under its final name.
            self.path.replace(self.partial)
            self.finished = False
        position = self.layout.offsets[name] + offset
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


def open_files(paths: Iterable[Path], layout: FileLayout, *, resume: bool) -> list[RankFile]:
    """All files, with their space reserved; what was reserved is given back where one cannot be.

    Raises:
        CheckpointError: see `RankFile`.
    """
    files: list[RankFile] = []
    try:
        files.extend(RankFile(path, layout, resume=resume) for path in paths)
    except CheckpointError:
        for file in files:
            file.close(discard=True)
        raise
    return files


class LayerSink:
    """One layer's parts on their way into the files: cut by the plan, written, and hashed.

    Experts must come in order. A rank's file is touched by one thread at a time.

    Args:
        planned: the layer's tensors by name.
        files: the ranks' files.
        wanted: numbers of the ranks that are written; the others have the layer already.
        pool: whose threads the ranks are divided among.
        threads: how many these are.
        digest: of the checksums.
    """

    def __init__(
        self,
        planned: dict[str, PlannedTensor],
        files: Sequence[RankFile],
        wanted: Sequence[int],
        pool: ThreadPoolExecutor,
        threads: int,
        digest: MakeDigest,
    ) -> None:
        self.planned, self.files, self.pool = planned, files, pool
        step = -(-len(wanted) // min(len(wanted), threads))
        self._shares = [wanted[first : first + step] for first in range(0, len(wanted), step)]
        self._digests: dict[int, dict[str, Digest]] = {rank: defaultdict(digest) for rank in wanted}
        self._written: dict[int, dict[str, int]] = {rank: defaultdict(int) for rank in wanted}
        self._experts: dict[str, list[Part]] = defaultdict(list)
        self._waiting = 0

    def add(self, parts: list[Part]) -> None:
        """Take what one module or expert became; experts may be held back until there are enough to write."""
        expert = parts[0].expert
        for part in parts:
            tensor = self.planned[part.name]
            shape = tensor.shape if expert is None else tensor.expert_shape
            if tuple(part.tensor.shape) != shape or part.tensor.dtype != tensor.dtype:
                expected, found = f"{tensor.dtype} {list(shape)}", f"{part.tensor.dtype} {list(part.tensor.shape)}"
                raise CheckpointError(f"planned {expected}, made {found}", tensor=part.name)
        if expert is None:
            whole = [(self.planned[part.name], part.tensor) for part in parts]
            self._append(lambda rank: ((tensor, [tensor_bytes(tensor.local(made, rank))]) for tensor, made in whole))
            return
        for part in parts:
            self._experts[part.name].append(part)
            self._waiting += part.tensor.nbytes
        local = self.planned[parts[0].name].experts_of(0)
        if self._waiting >= _GROUP_BYTES or (expert + 1) % len(local) == 0:
            self._write_experts()

    def _write_experts(self) -> None:
        groups = [(self.planned[name], parts[0].expert, _shares(parts)) for name, parts in self._experts.items()]

        def cuts(rank: int) -> Iterable[tuple[PlannedTensor, Sequence[memoryview]]]:
            for tensor, first, shares in groups:
                assert first is not None
                held, pieces = tensor.experts_of(rank), shares[rank % len(shares)]
                if first not in held:
                    continue
                if (first - held.start) * len(pieces[0]) != self._written[rank][tensor.name]:
                    raise CheckpointError("experts do not follow each other", tensor=tensor.name)
                yield tensor, pieces

        self._append(cuts)
        self._experts.clear()
        self._waiting = 0

    def add_rows(self, tensor: PlannedTensor, rows: Tensor, holder: int | None) -> None:
        """Append rows of a matrix: to `holder`, or to every rank its columns of them."""
        self._append(
            lambda rank: [(tensor, [tensor_bytes(rows if holder is not None else tensor.local(rows, rank))])]
            if holder in (None, rank) else []
        )  # fmt: skip

    def _append(self, cuts: Callable[[int], Iterable[tuple[PlannedTensor, Sequence[memoryview]]]]) -> None:
        """Append to each rank's tensors what `cuts` gives of them."""

        def write(ranks: Sequence[int]) -> None:
            # Cutting, hashing and writing release the interpreter's lock.
            for rank in ranks:
                written, digests = self._written[rank], self._digests[rank]
                for tensor, pieces in cuts(rank):
                    name = tensor.name
                    written[name] += self.files[rank].write(name, pieces, written[name])
                    for piece in pieces:
                        digests[name].update(piece)

        list(self.pool.map(write, self._shares))

    def finish(self) -> dict[int, dict[str, str]]:
        """Write what is held back; checksums by rank and name.

        Raises:
            MissingTensorError: a planned tensor was not fully written.
        """
        if self._experts:
            self._write_experts()
        sizes = {name: tensor.spec().nbytes for name, tensor in self.planned.items()}
        for written in self._written.values():
            for name, size in sizes.items():
                if written[name] != size:
                    raise MissingTensorError("planned, but not (fully) made", tensor=name)
        return {rank: {name: self._digests[rank][name].hexdigest() for name in sizes} for rank in self._digests}


def _shares(experts: list[Part]) -> list[list[memoryview]]:
    """Of each rank of those that share the experts, the bytes of each expert."""
    whole = [part.tensor.view(len(part.tensor), -1).view(torch.uint8).numpy() for part in experts]
    return [[one[share].data for one in whole] for share in range(len(whole[0]))]


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
        self._job: Future[None] | None = None

    def wrote(self, count: int) -> None:
        """So many more bytes were handed to the operating system."""
        self._unsent += count
        if self._unsent >= _EARLY and (self._job is None or self._job.done()):
            self.end_layer(lambda: None)

    def end_layer(self, then: Callable[[], None]) -> None:
        """Flush all that was written, then call `then`; waits until the layer before has come so far."""
        self.wait()

        def flush() -> None:
            for file in self._files:
                file.sync()
            then()

        self._unsent = 0
        self._job = self._pool.submit(flush)

    def wait(self) -> None:
        """Until everything is done."""
        if self._job is not None:
            self._job.result()

    def __enter__(self) -> Flusher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
