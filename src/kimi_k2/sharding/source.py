"""What identifies a checkpoint between two runs: its shards' sizes, times, inodes and headers, and bytes if asked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kimi_k2.checkpoint.header import header_bytes
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.errors import CheckpointError, ConfigError, MissingShardError

_CHUNK = 2**22
# What a change of the bytes need not change, and a copy of the same bytes does.
_CIRCUMSTANCES = ("mtime_ns", "inode")


def identify(reader: CheckpointReader, *, hash_bytes: bool = False) -> dict[str, dict[str, Any]]:
    """By shard: `size`, `mtime_ns`, `inode`, `header_sha256`, and `sha256` of all bytes if `hash_bytes`."""
    paths = {name: reader.directory / name for name in reader.index.shards}
    found = {}
    for name, path in paths.items():
        found[name] = {**_status(path), "header_sha256": hashlib.sha256(header_bytes(path)).hexdigest()}
    if hash_bytes:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for name, digest in zip(paths, pool.map(_sha256, paths.values()), strict=True):
                found[name]["sha256"] = digest
    return found


def _status(path: Path) -> dict[str, Any]:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise MissingShardError("no such file any more", file=path) from None
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def check_same(recorded: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Refuse to go on from another source. Where both runs hashed the bytes, they alone decide.

    Args:
        recorded: what `identify` gave when the conversion began.
        found: what it gives now.
        file: where `recorded` was read.

    Raises:
        ConfigError: naming the first shard that differs, and how.
    """
    if recorded.keys() != found.keys():
        other = sorted(recorded.keys() ^ found.keys())[0]
        raise ConfigError(f"made from another source: {other} is in one of them only", file=file)
    for name, before in recorded.items():
        now = found[name]
        for key in ("size", "header_sha256"):
            if before.get(key) != now[key]:
                raise ConfigError(f"made from another source: {name} has another {key}", file=file)
        if "sha256" in before and "sha256" in now:
            if before["sha256"] != now["sha256"]:
                raise ConfigError(f"made from another source: {name} has other bytes", file=file)
            continue
        for key in _CIRCUMSTANCES:
            if before.get(key) != now[key]:
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
        if any(before[key] != now[key] for key in now):
            raise CheckpointError("changed while it was being converted", file=directory / name)
