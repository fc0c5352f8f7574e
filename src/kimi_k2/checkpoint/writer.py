"""Safetensors files written in a stream: the header first, then each tensor at its own offset.

safetensors' own `save_file` needs all tensors of a file in memory at once; a real Kimi-K2 layer is 17 GB.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from kimi_k2.checkpoint.index import INDEX_NAME, encode_header
from kimi_k2.errors import CheckpointError, MissingTensorError, TensorDtypeError, TensorShapeError
from kimi_k2.files import PARTIAL_SUFFIX, errors_of, open_output, replace_file
from kimi_k2.quantization.stored import TensorSpec


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw little-endian bytes of a CPU tensor, without a copy if it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


class SafetensorsWriter:
    """One safetensors file with a layout known beforehand, filled in any order by positioned writes.

    The file is written as `<name>.partial`, preallocated, and renamed by `close` after fsync, so a file under its
    final name is always whole.

    Raises:
        MissingTensorError: `close` before every byte of every tensor was written.
        TensorShapeError, TensorDtypeError: a tensor differs from its spec.
        CheckpointError: the disk is full or the file cannot be written.
    """

    def __init__(
        self, path: str | Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + PARTIAL_SUFFIX)
        self.specs = {spec.name: spec for spec in specs}
        prefix, self._offsets = encode_header(self.specs.values(), metadata)
        self._remaining = {name: spec.nbytes for name, spec in self.specs.items()}
        total = len(prefix) + sum(self._remaining.values())
        try:
            self._fd = open_output(self.partial, truncate=True)
        except OSError as error:
            raise CheckpointError(f"cannot be made: {error.strerror}", file=self.partial) from error
        try:
            # Reserving the space now turns a full disk into an error before hours of work, not after.
            os.posix_fallocate(self._fd, 0, total)
            self._pwrite(memoryview(prefix), 0)
        except OSError as error:
            self.abandon()
            raise CheckpointError(f"cannot write {total} bytes: {error.strerror}", file=self.partial) from error

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor."""
        spec = self.specs.get(name)
        if spec is None:
            raise MissingTensorError("not in this file's layout", file=self.path, tensor=name)
        if tensor.dtype != spec.dtype:
            raise TensorDtypeError(f"expected {spec.dtype}, got {tensor.dtype}", file=self.path, tensor=name)
        if tuple(tensor.shape) != spec.shape:
            raise TensorShapeError(
                f"expected {list(spec.shape)}, got {list(tensor.shape)}", file=self.path, tensor=name
            )
        self.write_bytes(name, tensor_bytes(tensor), 0)

    def write_bytes(self, name: str, data: memoryview, offset: int) -> None:
        """Write `data` at byte `offset` within the tensor; the parts of a tensor must not overlap."""
        if offset + len(data) > self.specs[name].nbytes:
            raise TensorShapeError(
                f"{len(data)} bytes at offset {offset} do not fit into {self.specs[name].nbytes}",
                file=self.path,
                tensor=name,
            )
        try:
            self._pwrite(data, self._offsets[name] + offset)
        except OSError as error:
            raise CheckpointError(f"cannot be written: {error.strerror}", file=self.partial, tensor=name) from error
        self._remaining[name] -= len(data)

    def _pwrite(self, data: memoryview, position: int) -> None:
        while data:
            written = os.pwrite(self._fd, data, position)
            data, position = data[written:], position + written

    def close(self) -> None:
        """Check that nothing is missing, flush to the disk and give the file its final name."""
        unfinished = [name for name, count in self._remaining.items() if count]
        if unfinished:
            raise MissingTensorError(
                f"not (fully) written, with {len(unfinished) - 1} others",
                file=self.partial,
                tensor=unfinished[0],
            )
        try:
            with errors_of(self.partial, "flushed"):
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
        self.partial.replace(self.path)

    def abandon(self) -> None:
        """Close and remove the unfinished file."""
        os.close(self._fd)
        self.partial.unlink(missing_ok=True)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def write_json(path: Path, content: object) -> None:
    """Write JSON as `replace_file` does."""
    replace_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write `model.safetensors.index.json` as Hugging Face lays it out."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX_NAME, content)
