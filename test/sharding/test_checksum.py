"""What older versions wrote: kinds of checksums, which are read and gone on with, and forms that are no more."""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kimi_k2.checkpoint.index import header_bytes
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, CorruptHeaderError
from kimi_k2.sharding import presharder
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import JOURNAL, MANIFEST, check_made_for, made_layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import faults, verify

LAYOUT = Layout(2)
RANK_1 = "tp1_sharded_checkpoint.safetensors"


def manifest_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    return content


def resign(directory: Path, content: dict[str, Any]) -> None:
    rest = {name: value for name, value in content.items() if name != "sha256"}
    content["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(content))


def damage(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def convert(source: Path, output: Path, *, kind: str, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as context:
        context.setattr(presharder, "CHECKSUM", kind)
        Presharder(source, output, LAYOUT).run()


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


@pytest.mark.parametrize("named", [True, False])
def test_a_manifest_of_sha256_is_verified_and_mended(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    convert(checkpoints["fp8"], tmp_path, kind="sha256", patch=monkeypatch)
    content = manifest_of(tmp_path)
    assert content["checksum"] == "sha256"
    assert all(len(digest) == 64 for sums in content["checksums"].values() for digest in sums.values())
    if not named:
        del content["checksum"]
        resign(tmp_path, content)
    assert len(list(verify(tmp_path))) == 2
    path = tmp_path / "weights" / RANK_1
    whole = path.read_bytes()
    damage(path, len(whole) - 1)
    assert [fault.file for fault in faults(tmp_path)] == [str(path)]
    path.unlink()
    Presharder(checkpoints["fp8"], tmp_path, LAYOUT).run()
    assert path.read_bytes() == whole
    assert manifest_of(tmp_path)["checksum"] == "sha256"
    assert len(list(verify(tmp_path))) == 2


@pytest.mark.parametrize("named", [True, False])
def test_a_journal_of_sha256_is_gone_on_with(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    class StopError(Exception):
        pass

    def stop(layer: int, _: object) -> None:
        if layer == 1:
            raise StopError

    with monkeypatch.context() as context:
        context.setattr(presharder, "CHECKSUM", "sha256")
        with pytest.raises(StopError):
            Presharder(checkpoints["fp8"], tmp_path, LAYOUT, on_layer=stop).run()
    lines = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    if not named:
        first = json.loads(lines[0])
        del first["checksum"]
        (tmp_path / JOURNAL).write_text(json.dumps(first) + "\n" + "".join(lines[1:]))
    redone: list[int] = []
    Presharder(checkpoints["fp8"], tmp_path, LAYOUT, on_layer=lambda layer, _: redone.append(layer)).run()
    assert redone == [2]  # what was finished is kept
    assert manifest_of(tmp_path)["checksum"] == "sha256"
    assert len(list(verify(tmp_path))) == 2


@pytest.mark.parametrize("kind", ["crc32", 3, ["xxh3_128"], None])
def test_an_unknown_kind_is_named(checkpoints: dict[str, Path], tmp_path: Path, kind: object) -> None:
    Presharder(checkpoints["fp8"], tmp_path, LAYOUT).run()
    content = manifest_of(tmp_path)
    content["checksum"] = kind
    resign(tmp_path, content)
    with pytest.raises(CorruptHeaderError, match="checksum: expected xxh3_128 or sha256"):
        list(verify(tmp_path))
    os.truncate(tmp_path / "weights" / RANK_1, 100)
    with pytest.raises(CheckpointError, match="checksum: expected xxh3_128 or sha256"):
        Presharder(checkpoints["fp8"], tmp_path, LAYOUT).run()


@pytest.mark.parametrize("before", [
    {"decode": "kernels"}, {"decode": None, "early_router": True}, {"decode": None, "attention_tiles": "fp8"},
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
        with pytest.raises(ConfigError, match="convert again with a preset of decode layers") as caught:
            use()
        assert caught.value.field == list(before)[-1]
