"""Malformed checkpoints: an error that names file, tensor or field, or rightly accepted, without losing time or memory.

Every kind is loaded and asked for a reply; damaged values are converted too, with `KIMI_K2_SLOW=1` all kinds. Seven of
each mechanism are drawn too, or as many as `KIMI_K2_DRAWS` says. What commands make of errors: `cli/test_errors.py`.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import kinds_of_shards
import kinds_of_text
import kinds_of_tokenizers
import pytest
from damage import Kind, private_copy
from mechanisms import drawn

from kimi_k2.api import KimiK2
from kimi_k2.errors import KimiK2Error
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder

SEEDS = 2 * int(os.environ.get("KIMI_K2_DRAWS", "7"))
ALL = bool(os.environ.get("KIMI_K2_SLOW"))
KINDS = [*kinds_of_text.kinds(), *kinds_of_shards.kinds(), *kinds_of_tokenizers.kinds()]
# Of CPU, and of memory beyond the most that this process has held.
MOST_SECONDS, MOST_BYTES = 5.0, 500e6
READERS: dict[str, Callable[[Path], object]] = {
    "load": lambda directory: KimiK2.from_pretrained(directory).chat("Hi", max_new_tokens=1),
    "convert": lambda directory: Presharder(directory, directory.with_name("out"), Layout(2)).run(),
}


def check(directory: Path, kind: Kind, reader: str) -> None:
    """A refusal names a file, a field or a tensor, and what the kind says."""
    began, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = reader in kind.refused if kind.refused is not None else None
    try:
        READERS[reader](directory)
    except KimiK2Error as error:
        assert refused is not False, (kind, error)
        assert re.search(r"/|field '|tensor '", str(error)), (kind, error)
        assert kind.says in " ".join(str(error).split()), (kind, error)
        way = kind.name.rpartition(": ")[2]
        assert way not in ("a pipe", "a socket", "a directory") or f"regular file, got {way}" in str(error)
    else:
        assert not refused, kind
    seconds, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert seconds < MOST_SECONDS and (peak - held) * 1024 < MOST_BYTES, (kind, seconds, peak - held)


def test_kinds_have_names_of_their_own() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: re.sub(r"[^\w .=:-]", "_", kind.name))
def test_a_kind(checkpoints: dict[str, Path], tmp_path: Path, kind: Kind) -> None:
    directory = private_copy(checkpoints[kind.base], tmp_path / "checkpoint")
    kind.damage(directory)
    for reader in READERS if ALL or kind.name.startswith("data") else ["load"]:
        check(directory, kind, reader)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_mechanism(checkpoints: dict[str, Path], tmp_path: Path, seed: int) -> None:
    base = checkpoints[("fp8", "thinking", "bf16", "k2.5")[seed // 2 % 4]]
    kind = drawn(seed, base)
    directory = private_copy(base, tmp_path / "checkpoint")
    kind.damage(directory)
    for reader in READERS if ALL else ["load"]:
        check(directory, kind, reader)
