"""Checksums of tensors' bytes: against accidents, not against forgers, who could rewrite the manifest as well."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import xxhash

from kimi_k2.errors import CorruptHeaderError

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
