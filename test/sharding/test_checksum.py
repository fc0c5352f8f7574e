"""Checksums, and what other versions wrote: refused by the name of what this one does not read."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kimi_k2.checkpoint.index import header_bytes
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, CorruptHeaderError
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import JOURNAL, MANIFEST, check_made_for, made_layout
from kimi_k2.sharding.presharder import Presharder

LAYOUT = Layout(2)


def manifest_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    return content


def resign(directory: Path, content: dict[str, Any]) -> None:
    rest = {name: value for name, value in content.items() if name != "sha256"}
    content["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(content))


def test_checksums_are_those_of_the_libraries(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    Presharder(checkpoints["fp8"], tmp_path, LAYOUT).run()
    content = manifest_of(tmp_path)
    assert content["checksum"] == "xxh3_128"
    for name, sums in content["checksums"].items():
        path = tmp_path / "weights" / name
        header, data = header_bytes(path), path.read_bytes()
        entries = json.loads(header[8:])
        assert set(entries) - {"__metadata__"} == set(sums)
        for tensor, digest in sums.items():
            first, last = entries[tensor]["data_offsets"]
            assert digest == xxhash.xxh3_128(data[len(header) + first : len(header) + last]).hexdigest()


@pytest.mark.parametrize("kind", ["sha256", 3, ["xxh3_128"], None])
def test_another_kind_is_named(checkpoints: dict[str, Path], tmp_path: Path, kind: object) -> None:
    Presharder(checkpoints["fp8"], tmp_path, LAYOUT).run()
    content = manifest_of(tmp_path)
    content["checksum"] = kind
    resign(tmp_path, content)
    begun = {name: content[name] for name in ("made_from", "checksum")}
    for file in (MANIFEST, JOURNAL):
        with pytest.raises(CorruptHeaderError, match=r"checksum: expected xxh3_128, got .*; convert again") as caught:
            Presharder(checkpoints["fp8"], tmp_path, LAYOUT).run()
        assert caught.value.file == str(tmp_path / file)
        (tmp_path / MANIFEST).unlink(missing_ok=True)
        (tmp_path / JOURNAL).write_text(json.dumps(begun) + "\n")


@pytest.mark.parametrize("before", [
    {"decode": "kernels"}, {"decode": None, "early_router": True}, {"decode": None, "spmd_rank": True},
])  # fmt: skip
def test_a_form_of_decode_that_is_no_more_is_named(
    checkpoints: dict[str, Path], tmp_path: Path, before: dict[str, Any]
) -> None:
    config, layout = KimiK2Config.from_pretrained(checkpoints["fp8"]), Layout(2, experts="tiles")
    Presharder(checkpoints["fp8"], tmp_path, layout).run()
    content = manifest_of(tmp_path)
    given = {**content["made_from"]["options"], **before}
    content["made_from"]["options"] = {name: value for name, value in given.items() if value is not None}
    resign(tmp_path, content)
    uses = (
        partial(check_made_for, tmp_path, config, layout), Presharder(checkpoints["fp8"], tmp_path, layout).run,
        partial(made_layout, tmp_path),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(ConfigError, match="; convert again") as caught:
            use()
        assert caught.value.field == list(before)[-1]
