"""Whether a finished conversion is still what its manifest says: files, headers and every tensor's bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from kimi_k2.checkpoint.index import header_bytes, open_tensors
from kimi_k2.checkpoint.writer import tensor_bytes
from kimi_k2.errors import (
    CheckpointError,
    CorruptHeaderError,
    MissingShardError,
    MissingTensorError,
    TensorDtypeError,
    TensorShapeError,
    TruncatedShardError,
    UnexpectedTensorError,
)
from kimi_k2.files import PARTIAL_SUFFIX, open_regular, parse_json
from kimi_k2.sharding.manifest import MANIFEST, VISION_FILE, WEIGHTS, file_layout, load_manifest, rank_file_name
from kimi_k2.sharding.rank_files import FIRST_CHECKSUM, FileLayout, MakeDigest, digest_maker

_MEND = "`kimi-k2 convert --verify-output` from the same checkpoint makes it again"
OnBytes = Callable[[int], None] | None


def verify(directory: str | Path, on_bytes: OnBytes = None) -> Iterator[str]:
    """Read everything again; yields the name of each rank's file that is as the manifest says.

    Raises:
        CheckpointError: (subclasses) the first of `faults`.
    """
    for name, found in _files(Path(directory), on_bytes):
        for fault in found:
            raise fault
        if name:
            yield name


def faults(directory: str | Path, on_bytes: OnBytes = None) -> Iterator[CheckpointError]:
    """Every fault of a finished conversion: missing, extra and truncated files, headers, tensors' bytes.

    Raises:
        MissingShardError, CorruptHeaderError: the manifest itself is missing or damaged.
    """
    for _, found in _files(Path(directory), on_bytes):
        yield from found


def _files(directory: Path, on_bytes: OnBytes) -> Iterator[tuple[str, Iterator[CheckpointError]]]:
    """Name of each rank's file, and its faults; then without a name those of the tower and of files beside."""
    manifest = load_manifest(directory)
    layout, digest = file_layout(manifest), _digest(directory, manifest)
    for name in manifest["files"]:
        yield name, _faults_of(directory / WEIGHTS / name, layout, manifest["checksums"][name], digest, on_bytes)
    yield "", vision_faults(directory, on_bytes)
    others = (path for path in sorted((directory / WEIGHTS).glob("*")) if path.name not in manifest["files"])
    extra = (path for path in others if not path.name.endswith(PARTIAL_SUFFIX))
    yield "", (UnexpectedTensorError("the manifest knows no such file", file=path) for path in extra)


def vision_faults(directory: Path, on_bytes: OnBytes = None) -> Iterator[CheckpointError]:
    """What differs in the tower's file from its checksums.

    Raises:
        MissingShardError, CorruptHeaderError: the manifest is missing or damaged.
    """
    manifest = load_manifest(directory)
    if tower := manifest.get("vision"):
        digest = _digest(directory, manifest)
        yield from _faults_of(directory / VISION_FILE, file_layout(tower), tower["checksums"], digest, on_bytes)


@contextmanager
def open_rank_file(directory: Path, rank: int) -> Iterator[Callable[[str], Tensor]]:
    """What reads a tensor of a finished conversion's file by its name, and compares it with its checksum.

    Raises:
        MissingShardError, CorruptHeaderError: the manifest or the file is missing or damaged.
        MissingTensorError: (when reading) the file has no such tensor.
        CheckpointError: (when reading) the bytes are not those that were written.
    """
    manifest = load_manifest(directory)
    path = directory / WEIGHTS / rank_file_name(rank)
    sums, make_digest = manifest["checksums"][path.name], _digest(directory, manifest)
    try:
        with open_tensors(path) as file:
            names = set(file.keys())

            def read(name: str) -> Tensor:
                if name not in names:
                    raise MissingTensorError("not in the file", file=path, tensor=name)
                tensor: Tensor = file.get_tensor(name)
                digest = make_digest()
                digest.update(tensor_bytes(tensor))
                if digest.hexdigest() != sums.get(name):
                    raise CheckpointError(
                        f"the bytes differ from the manifest's checksum; {_MEND}", file=path, tensor=name
                    )
                return tensor

            yield read
    except (OSError, SafetensorError) as error:
        raise MissingShardError(f"cannot be read: {error}", file=path) from None


def _digest(directory: Path, manifest: dict[str, Any]) -> MakeDigest:
    return digest_maker(manifest.get("checksum", FIRST_CHECKSUM), directory / MANIFEST)


def _faults_of(
    path: Path, layout: FileLayout, checksums: dict[str, str], digest: MakeDigest, on_bytes: OnBytes
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
                yield from _header_faults(path, layout)
                return
            for name in layout.specs:
                if layout.checksum(file.fileno(), name, digest, on_bytes) != checksums[name]:
                    yield CheckpointError("the bytes differ from the manifest's checksum", file=path, tensor=name)
    except OSError as error:
        yield CheckpointError(f"cannot be read: {error.strerror}", file=path)


def _header_faults(path: Path, layout: FileLayout) -> Iterator[CheckpointError]:
    """What differs in a header whose bytes are not those that were written; the first difference of each tensor."""
    try:
        actual = parse_json(header_bytes(path)[8:])
        expected = parse_json(layout.prefix[8:])
        items = actual.items()
    except (ValueError, CheckpointError, AttributeError) as error:
        yield CorruptHeaderError(f"the header cannot be parsed: {error}", file=path)
        return
    if actual.get("__metadata__") != expected["__metadata__"]:
        yield CorruptHeaderError(
            f"expected metadata {expected['__metadata__']}, got {actual.get('__metadata__')}", file=path
        )
    for name in sorted(expected.keys() - actual.keys()):
        yield MissingTensorError("in the manifest, but not in the file", file=path, tensor=name)
    for name in sorted(actual.keys() - expected.keys()):
        yield UnexpectedTensorError("in the file, but not in the manifest", file=path, tensor=name)
    for name, entry in items:
        if name == "__metadata__" or name not in expected or entry == expected[name]:
            continue
        kinds = (("dtype", TensorDtypeError), ("shape", TensorShapeError), ("data_offsets", CorruptHeaderError))
        for key, kind in kinds:
            value = entry.get(key) if isinstance(entry, dict) else None
            if value != expected[name][key]:
                yield kind(f"{key}: expected {expected[name][key]}, got {value}", file=path, tensor=name)
                break
        else:
            yield CorruptHeaderError("has members that no header has", file=path, tensor=name)
    if actual == expected:
        yield CorruptHeaderError("the header's bytes are not those that were written", file=path)
