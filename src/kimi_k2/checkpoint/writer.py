"""Safetensors files whose layout is known beforehand, filled by positioned writes and taken up again after a kill.

safetensors' own `save_file` needs all tensors of a file in memory at once; a real Kimi-K2 layer is 17 GB.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import xxhash
from torch import Tensor

from kimi_k2.checkpoint.index import DTYPE_CODES, INDEX_NAME
from kimi_k2.errors import CheckpointError, MissingTensorError, TensorShapeError
from kimi_k2.files import PARTIAL_SUFFIX, errors_of, open_output, open_regular, replace_file
from kimi_k2.quantization.stored import TensorSpec

# Ten times as fast as SHA-256, which took a fifth of a conversion's time.
CHECKSUM = "xxh3_128"
RESUME = "what is finished is kept; make room or mend the disk and run the same command again"
_AT_ONCE = os.sysconf("SC_IOV_MAX")
_CHUNK = 2**22


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw little-endian bytes of a CPU tensor, without a copy if it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


@dataclass(frozen=True)
class FileLayout:
    """What all files with the same tensors have in common.

    Attributes:
        specs: tensors by name, in the order of the file.
        prefix: the file's first bytes: length and header.
        offsets: where each tensor begins in the file.
        sizes: bytes of each tensor.
        nbytes: size of a file.
    """

    specs: dict[str, TensorSpec]
    prefix: bytes
    offsets: dict[str, int]
    sizes: dict[str, int]
    nbytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> FileLayout:
        """The layout of a file with these tensors."""
        by_name = {spec.name: spec for spec in specs}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        sizes, offsets, position = {name: spec.nbytes for name, spec in by_name.items()}, {}, 0
        for name, spec in by_name.items():
            offsets[name], end = position, position + sizes[name]
            header[name] = {
                "dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, end],
            }  # fmt: skip
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format asks for data aligned to 8 bytes
        prefix = len(text).to_bytes(8, "little") + text
        offsets = {name: len(prefix) + offset for name, offset in offsets.items()}
        return cls(by_name, prefix, offsets, sizes, len(prefix) + position)

    def is_whole(self, path: Path) -> bool:
        """Whether a file is there with this size and header; what the tensors hold is not looked at."""
        try:
            with open_regular(path) as file:
                return os.fstat(file.fileno()).st_size == self.nbytes and file.read(len(self.prefix)) == self.prefix
        except OSError:
            return False

    def checksum(self, descriptor: int, name: str, on_bytes: Callable[[int], None] | None = None) -> str:
        """Checksum of a tensor's bytes in an open file, or of fewer where it was cut short meanwhile."""
        digest, position = xxhash.xxh3_128(), self.offsets[name]
        end = position + self.sizes[name]
        while position < end and (chunk := os.pread(descriptor, min(_CHUNK, end - position), position)):
            digest.update(chunk)
            position += len(chunk)
            if on_bytes:
                on_bytes(len(chunk))
        return digest.hexdigest()


class SafetensorsFile:
    """One file: `<path>.partial`, preallocated, until `finish`, `path` afterwards, so that this name's is always whole.

    Used in a `with` statement it is finished at the end of it, and removed where that ends in an error.

    Args:
        path: of the file.
        layout: its tensors.
        resume: take up the file that is there, finished or not, untruncated: who writes decides what of it is valid;
            otherwise it is made anew.

    Attributes:
        finished: it has its final name.
        fresh: nothing of it is valid yet: it was made now, or what was there had another size or header.
        sums: checksums of all tensors, once a `with` statement has ended.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """

    def __init__(self, path: Path, layout: FileLayout, *, resume: bool = False) -> None:
        self.path, self.layout = path, layout
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self.finished = resume and layout.is_whole(path) and not self.partial.exists()
        self.fresh = False
        self._written: dict[str, tuple[int, xxhash.xxh3_128]] = {}
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
            # Reserving the space now turns a full disk into an error before hours of work, not after.
            os.posix_fallocate(self._fd, 0, layout.nbytes)
            self._pwrite([memoryview(layout.prefix)], 0)
        except OSError as error:
            self.close(discard=True)
            raise CheckpointError(
                f"cannot reserve {layout.nbytes} bytes: {error.strerror}; {RESUME}", file=self.path
            ) from error

    def holds(self, checksums: Mapping[str, str]) -> bool:
        """Whether the tensors on the disk have these checksums."""
        with errors_of(self.path if self.finished else self.partial, "read"):
            return not self.fresh and all(
                self.layout.checksum(self._fd, name) == digest for name, digest in checksums.items()
            )

    def append(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Write the next bytes of a tensor, and count them into its checksum.

        Raises:
            TensorShapeError: they reach beyond the tensor.
        """
        done, digest = self._written.get(name) or (0, xxhash.xxh3_128())
        count = sum(map(len, pieces))
        if done + count > self.layout.sizes[name]:
            beyond = f"{count} bytes behind {done} do not fit into {self.layout.sizes[name]}"
            raise TensorShapeError(beyond, file=self.partial, tensor=name)
        if self.finished:
            # A damaged tensor of a finished file is mended in place; until then it is not under its final name.
            self.path.replace(self.partial)
            self.finished = False
        position = self.layout.offsets[name] + done
        try:
            for first in range(0, len(pieces), _AT_ONCE):
                position = self._pwrite(pieces[first : first + _AT_ONCE], position)
        except OSError as error:
            raise CheckpointError(
                f"cannot be written: {error.strerror}; {RESUME}", file=self.partial, tensor=name
            ) from error
        for piece in pieces:
            digest.update(piece)
        self._written[name] = done + count, digest

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

    def checksums(self, names: Iterable[str]) -> dict[str, str]:
        """Checksums of tensors that were written.

        Raises:
            MissingTensorError: one was not fully written.
        """
        names = list(names)
        lacking = [name for name in names if self._written.get(name, (0,))[0] != self.layout.sizes[name]]
        if lacking:
            others = f"not (fully) written, with {len(lacking) - 1} others"
            raise MissingTensorError(others, file=self.partial, tensor=lacking[0])
        return {name: self._written.pop(name)[1].hexdigest() for name in names}

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
        if discard and self.fresh and not self.finished:
            self.partial.unlink(missing_ok=True)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.sums = self.checksums(self.layout.specs)
                self.finish()
        finally:
            self.close(discard=True)


def write_json(path: Path, content: object) -> None:
    """Write JSON as `replace_file` does."""
    replace_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write `model.safetensors.index.json` as Hugging Face lays it out."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX_NAME, content)
