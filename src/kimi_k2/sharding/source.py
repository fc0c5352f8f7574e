"""What identifies a checkpoint: its shards' sizes, times, inodes and headers, a sample of every tensor, bytes if asked.

Fine-tunes of one model have equal configurations, names, sizes and headers; only values tell them apart. Training moves
values all over a tensor, so 4 KiB of each of them do, in a second for each 100,000 tensors on a local disk.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from kimi_k2.checkpoint.index import header_bytes, read_header
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.errors import CheckpointError, ConfigError, KimiK2Warning, MissingShardError
from kimi_k2.files import errors_of, is_there, open_regular
from kimi_k2.sharding.manifest import MANIFEST, load_manifest

_CHUNK = 2**22
# What a change of the bytes need not change, and a copy of the same bytes does.
_CIRCUMSTANCES = ("mtime_ns", "ctime_ns", "inode")
# One of a tensor lies at a place that its name draws; a smaller tensor is taken whole.
_SAMPLE = 4096
_READERS = 16


def identify(reader: CheckpointReader, *, hash_bytes: bool = False) -> dict[str, dict[str, Any]]:
    """By shard: `size`, `mtime_ns`, `ctime_ns`, `inode`, `header_sha256`, `sample`; `sha256` too if `hash_bytes`."""
    paths = {name: reader.directory / name for name in reader.index.shards}
    shards = {name: {**_status(path), "header_sha256": _header(path)} for name, path in paths.items()}
    with ThreadPoolExecutor(_READERS) as pool:
        for name, digest in zip(paths, pool.map(_sample, paths.values()), strict=True):
            shards[name]["sample"] = digest
    if hash_bytes:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for name, digest in zip(paths, pool.map(_sha256, paths.values()), strict=True):
                shards[name]["sha256"] = digest
    return shards


def _status(path: Path) -> dict[str, Any]:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise MissingShardError("no such file any more", file=path) from None
    # Who writes can put the first of the times back, not the second.
    times = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    return {"size": status.st_size, **times, "inode": status.st_ino}


def _header(path: Path) -> str:
    with errors_of(path, "read"):
        return hashlib.sha256(header_bytes(path)).hexdigest()


def _sample(path: Path) -> str:
    """Checksum of 4 KiB of every tensor."""
    digest, start = xxhash.xxh3_128(), len(header_bytes(path))
    with errors_of(path, "read"), open_regular(path) as file:
        descriptor = file.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        for name, entry in read_header(path).items():
            first, end = entry["data_offsets"]
            place = first + xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass")) % (
                max(end - first - _SAMPLE, 0) + 1
            )
            digest.update(os.pread(descriptor, min(_SAMPLE, end - place), start + place))
    return digest.hexdigest()


def check_source(directory: Path, checkpoint: Path) -> None:
    """Refuse a checkpoint with other weights than those that were converted; warn where it has none to compare.

    Args:
        directory: output of a finished conversion.
        checkpoint: directory of the checkpoint that is named now.

    Raises:
        ConfigError: naming the first shard that differs, and how.
        MissingShardError, CorruptHeaderError: see `load_manifest`.
    """
    file = directory / MANIFEST
    recorded = load_manifest(directory)["made_from"]["source"]["shards"]
    missing = [name for name in recorded if not is_there(checkpoint / name)]
    if len(missing) == len(recorded) and not any(checkpoint.glob("*.safetensors")):
        untold = f"{checkpoint} holds no weights: that {file} was made from this checkpoint is not checked"
        warnings.warn(untold, KimiK2Warning, stacklevel=2)
        return
    if missing:
        raise ConfigError(f"converted from another checkpoint: {missing[0]} is not in {checkpoint}", file=file)
    with ThreadPoolExecutor(_READERS) as pool:
        told = list(pool.map(lambda name: _difference(recorded[name], checkpoint / name), recorded))
    if difference := next((one for one in told if one), None):
        raise ConfigError(difference, file=file)


def _difference(recorded: Mapping[str, Any], path: Path) -> str | None:
    """Why a shard is not the one that was converted."""
    now = _status(path)
    if recorded.get("size") != now["size"] or recorded.get("header_sha256") != _header(path):
        return f"converted from another checkpoint than {path.parent}: {path.name} has another size or header"
    if all(recorded.get(key) == now[key] for key in _CIRCUMSTANCES):
        return None  # the same file, and nobody has written to it
    if "sample" not in recorded:
        return (
            f"an older version wrote it, without what tells weights apart, and {path} is not the file that it read:"
            " convert again, or give a directory with config.json and the tokenizer alone"
        )
    if recorded["sample"] != _sample(path):
        return f"converted from another checkpoint than {path.parent}: {path.name} has other values"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with errors_of(path, "read"), open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def check_same(recorded: Mapping[str, Mapping[str, Any]], actual: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Refuse to go on from another source. Where both runs hashed the bytes, they alone decide.

    Args:
        recorded: what `identify` gave when the conversion began.
        actual: what it gives now.
        file: where `recorded` was read.

    Raises:
        ConfigError: naming the first shard that differs, and how.
    """
    if recorded.keys() != actual.keys():
        other = sorted(recorded.keys() ^ actual.keys())[0]
        raise ConfigError(f"made from another source: {other} is in one of them only", file=file)
    for name, before in recorded.items():
        now = actual[name]
        for key in ("size", "header_sha256"):
            if before.get(key) != now[key]:
                raise ConfigError(f"made from another source: {name} has another {key}", file=file)
        if "sha256" in before and "sha256" in now:
            if before["sha256"] != now["sha256"]:
                raise ConfigError(f"made from another source: {name} has other bytes", file=file)
            continue
        for key in _CIRCUMSTANCES:
            if before.get(key, now[key]) != now[key]:  # what an older version did not note says nothing
                way = (
                    "--verify-source compares its bytes"
                    if "sha256" in before
                    else "give an empty directory (a run with --verify-source can be resumed from a copy)"
                )
                raise ConfigError(f"{name} was changed or copied since (its {key} differs); {way}", file=file)


def check_unchanged(directory: Path, recorded: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse shards that were written to while they were read.

    Raises:
        CheckpointError: naming the first.
    """
    for name, before in recorded.items():
        now = _status(directory / name)
        if any(before.get(key, now[key]) != now[key] for key in now):
            raise CheckpointError("changed while it was being converted", file=directory / name)
