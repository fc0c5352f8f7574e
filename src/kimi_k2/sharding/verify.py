"""Whether a finished conversion is still what its manifest says: files, headers and every tensor's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from torch import Tensor

from kimi_k2.checkpoint.index import DTYPES, header_bytes, open_tensors
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
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding.manifest import MANIFEST, VISION_FILE, WEIGHTS, load_manifest, rank_file_name, vision_layout
from kimi_k2.sharding.rank_file import FIRST_CHECKSUM, MEND, Digest, FileLayout, MakeDigest, digest_maker

_CHUNK = 2**22


def verify(directory: str | Path, on_bytes: Callable[[int], None] | None = None) -> Iterator[str]:
    """Read everything again; yields the name of each rank's file that is as the manifest says.

    Raises:
        CheckpointError: (subclasses) the first of `faults`.
    """
    directory = Path(directory)
    manifest = load_manifest(directory)
    layout, digest = _layout(manifest), _digest(directory, manifest)
    for name in manifest["files"]:
        for fault in _file_faults(directory / WEIGHTS / name, layout, manifest["checksums"][name], digest, on_bytes):
            raise fault
        yield name
    verify_vision(directory, on_bytes)
    for fault in _strangers(directory, manifest):
        raise fault


def faults(directory: str | Path, on_bytes: Callable[[int], None] | None = None) -> Iterator[CheckpointError]:
    """Every fault of a finished conversion: missing, extra and truncated files, headers, tensors' bytes.

    Raises:
        MissingShardError, CorruptHeaderError: the manifest itself is missing or damaged.
    """
    directory = Path(directory)
    manifest = load_manifest(directory)
    layout, digest = _layout(manifest), _digest(directory, manifest)
    for name in manifest["files"]:
        yield from _file_faults(directory / WEIGHTS / name, layout, manifest["checksums"][name], digest, on_bytes)
    if tower := manifest.get("vision"):
        yield from _vision_faults(directory, tower, digest, on_bytes)
    yield from _strangers(directory, manifest)


def verify_vision(directory: Path, on_bytes: Callable[[int], None] | None = None) -> None:
    """Compare the tower's file with its checksums.

    Raises:
        CheckpointError: (subclasses) the first difference.
    """
    manifest = load_manifest(directory)
    if tower := manifest.get("vision"):
        for fault in _vision_faults(directory, tower, _digest(directory, manifest), on_bytes):
            raise fault


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
                        f"the bytes differ from the manifest's checksum; {MEND}", file=path, tensor=name
                    )
                return tensor

            yield read
    except (OSError, SafetensorError) as error:
        raise MissingShardError(f"cannot be read: {error}", file=path) from None


def _vision_faults(
    directory: Path, tower: dict[str, Any], digest: MakeDigest, on_bytes: Callable[[int], None] | None
) -> Iterator[CheckpointError]:
    yield from _file_faults(directory / VISION_FILE, vision_layout(tower), tower["checksums"], digest, on_bytes)


def _layout(manifest: dict[str, Any]) -> FileLayout:
    tensors = manifest["tensors"].items()
    return FileLayout.of(TensorSpec(name, DTYPES[one["dtype"]], tuple(one["shape"])) for name, one in tensors)


def _digest(directory: Path, manifest: dict[str, Any]) -> MakeDigest:
    return digest_maker(manifest.get("checksum", FIRST_CHECKSUM), directory / MANIFEST)


def _strangers(directory: Path, manifest: dict[str, Any]) -> Iterator[CheckpointError]:
    for path in sorted((directory / WEIGHTS).glob("*")):
        if path.name not in manifest["files"] and not path.name.endswith(PARTIAL_SUFFIX):
            yield UnexpectedTensorError("the manifest knows no such file", file=path)


def _file_faults(
    path: Path,
    layout: FileLayout,
    checksums: dict[str, str],
    make_digest: MakeDigest,
    on_bytes: Callable[[int], None] | None,
) -> Iterator[CheckpointError]:
    if not path.is_file():
        yield MissingShardError("no such file", file=path)
        return
    if path.stat().st_size != layout.nbytes:
        yield TruncatedShardError(f"expected {layout.nbytes} bytes, got {path.stat().st_size}", file=path)
        return
    try:
        with open_regular(path) as file:
            if file.read(len(layout.prefix)) != layout.prefix:
                yield from _header_faults(path, layout)
                return
            for name in layout.specs:
                if _checksum(file, name, layout, make_digest(), on_bytes) != checksums[name]:
                    yield CheckpointError("the bytes differ from the manifest's checksum", file=path, tensor=name)
    except OSError as error:
        yield CheckpointError(f"cannot be read: {error.strerror}", file=path)


def _checksum(
    file: BinaryIO, name: str, layout: FileLayout, digest: Digest, on_bytes: Callable[[int], None] | None
) -> str:
    left = layout.specs[name].nbytes
    file.seek(layout.offsets[name])
    while left and (chunk := file.read(min(_CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
        if on_bytes:
            on_bytes(len(chunk))
    return digest.hexdigest()


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
