"""Whether a finished conversion is still what its manifest says: files, headers and every tensor's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    if tower := manifest.get("vision"):
        yield from _faults_of(directory / VISION_FILE, file_layout(tower), tower["checksums"], on_bytes)
    for path in sorted(weights.glob("*")):
        if path.name not in manifest["files"] and not path.name.endswith(PARTIAL_SUFFIX):
            yield UnexpectedTensorError("the manifest knows no such file", file=path)


def open_rank_file(directory: Path, rank: int) -> AbstractContextManager[Callable[[str], Tensor]]:
    """What reads a tensor of a finished conversion's file by its name, and compares it with its checksum.

    Raises:
        MissingShardError, TruncatedShardError, CorruptHeaderError: the manifest or the file is missing or damaged.
        MissingTensorError: (when reading) the file has no such tensor.
        CheckpointError: (when reading) the bytes are not those that were written.
    """
    manifest, name = load_manifest(directory), rank_file_name(rank)
    return _open(directory / WEIGHTS / name, file_layout(manifest), manifest["checksums"][name])


def open_tower(directory: Path) -> AbstractContextManager[Callable[[str], Tensor]]:
    """`open_rank_file` of the tower's file, of a model that has one."""
    tower = load_manifest(directory)["vision"]
    return _open(directory / VISION_FILE, file_layout(tower), tower["checksums"])


@contextmanager
def _open(path: Path, layout: FileLayout, sums: dict[str, str]) -> Iterator[Callable[[str], Tensor]]:
    try:
        if fault := _fault_of(path, layout):
            raise fault
        with open_tensors(path) as file:

            def read(name: str) -> Tensor:
                if name not in layout.specs:
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


def _fault_of(path: Path, layout: FileLayout) -> CheckpointError | None:
    """What is wrong with a file before its tensors are looked at."""
    if not path.is_file():
        return MissingShardError("no such file", file=path)
    if (size := path.stat().st_size) != layout.nbytes:
        return TruncatedShardError(f"expected {layout.nbytes} bytes, got {size}", file=path)
    if not layout.is_whole(path):
        return CorruptHeaderError("its header is not the one that was written", file=path)
    return None


def _faults_of(
    path: Path, layout: FileLayout, checksums: dict[str, str], on_bytes: OnBytes
) -> Iterator[CheckpointError]:
    try:
        if fault := _fault_of(path, layout):
            yield fault
            return
        with open_regular(path) as file:
            for name in layout.specs:
                if layout.checksum(file.fileno(), name, on_bytes) != checksums[name]:
                    yield CheckpointError("the bytes differ from the manifest's checksum", file=path, tensor=name)
    except OSError as error:
        yield CheckpointError(f"cannot be read: {error.strerror}", file=path)
