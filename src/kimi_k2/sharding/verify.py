"""Whether a finished conversion is still what its manifest says: files, headers and every tensor's bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from kimi_k2.checkpoint.index import open_tensors
from kimi_k2.checkpoint.writer import FileLayout, tensor_bytes
from kimi_k2.errors import (
    CheckpointError,
    CorruptHeaderError,
    MissingShardError,
    MissingTensorError,
    TruncatedShardError,
    UnexpectedTensorError,
)
from kimi_k2.files import PARTIAL_SUFFIX, open_regular
from kimi_k2.sharding.manifest import VISION_FILE, WEIGHTS, file_layout, load_manifest, rank_file_name

_MEND = "`kimi-k2 convert --verify-output` from the same checkpoint makes it again"
OnBytes = Callable[[int], None] | None


def faults(directory: str | Path, on_bytes: OnBytes = None) -> Iterator[CheckpointError]:
    """Every fault of a finished conversion: missing, extra and truncated files, headers, tensors' bytes.

    Raises:
        MissingShardError, CorruptHeaderError: the manifest itself is missing or damaged.
    """
    directory = Path(directory)
    manifest, weights = load_manifest(directory), directory / WEIGHTS
    layout = file_layout(manifest)
    for name in manifest["files"]:
        yield from _faults_of(weights / name, layout, manifest["checksums"][name], on_bytes)
    yield from vision_faults(directory, on_bytes)
    for path in sorted(weights.glob("*")):
        if path.name not in manifest["files"] and not path.name.endswith(PARTIAL_SUFFIX):
            yield UnexpectedTensorError("the manifest knows no such file", file=path)


def vision_faults(directory: Path, on_bytes: OnBytes = None) -> Iterator[CheckpointError]:
    """What differs in the tower's file from its checksums.

    Raises:
        MissingShardError, CorruptHeaderError: the manifest is missing or damaged.
    """
    if tower := load_manifest(directory).get("vision"):
        yield from _faults_of(directory / VISION_FILE, file_layout(tower), tower["checksums"], on_bytes)


@contextmanager
def open_rank_file(directory: Path, rank: int) -> Iterator[Callable[[str], Tensor]]:
    """What reads a tensor of a finished conversion's file by its name, and compares it with its checksum.

    Raises:
        MissingShardError, CorruptHeaderError: the manifest or the file is missing or damaged.
        MissingTensorError: (when reading) the file has no such tensor.
        CheckpointError: (when reading) the bytes are not those that were written.
    """
    path = directory / WEIGHTS / rank_file_name(rank)
    sums = load_manifest(directory)["checksums"][path.name]
    try:
        with open_tensors(path) as file:
            names = set(file.keys())

            def read(name: str) -> Tensor:
                if name not in names:
                    raise MissingTensorError("not in the file", file=path, tensor=name)
                tensor: Tensor = file.get_tensor(name)
                if xxh3_128_hexdigest(tensor_bytes(tensor)) != sums.get(name):
                    raise CheckpointError(
                        f"the bytes differ from the manifest's checksum; {_MEND}", file=path, tensor=name
                    )
                return tensor

            yield read
    except (OSError, SafetensorError) as error:
        raise MissingShardError(f"cannot be read: {error}", file=path) from None


def _faults_of(
    path: Path, layout: FileLayout, checksums: dict[str, str], on_bytes: OnBytes
) -> Iterator[CheckpointError]:
    if not path.is_file():
        yield MissingShardError("no such file", file=path)
        return
    if (size := path.stat().st_size) != layout.nbytes:
        yield TruncatedShardError(f"expected {layout.nbytes} bytes, got {size}", file=path)
        return
    try:
        with open_regular(path) as file:
            if os.pread(file.fileno(), len(layout.prefix), 0) != layout.prefix:
                yield CorruptHeaderError("its header is not the one that was written", file=path)
                return
            for name in layout.specs:
                if layout.checksum(file.fileno(), name, on_bytes) != checksums[name]:
                    yield CheckpointError("the bytes differ from the manifest's checksum", file=path, tensor=name)
    except OSError as error:
        yield CheckpointError(f"cannot be read: {error.strerror}", file=path)
