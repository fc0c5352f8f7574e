"""Conversion of tiny checkpoints: disks, damage, manifests and checksums, the vision tower, experts transposed."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from command import kimi
from rewritten import tensors_of
from safetensors.torch import load_file

from kimi_k2.checkpoint.index import header_bytes
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, CorruptHeaderError, MissingShardError
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.sharding import presharder
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import MANIFEST, UNFINISHED, VISION_FILE, check_made_for, load_manifest, made_layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import faults, open_tower

LAYOUT = Layout(2, 2)


def test_a_shard_that_goes_away_keeps_finished_layers(source: Path, whole: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))
    shard = own / Presharder(own, tmp_path / "a", LAYOUT).reader.index.shards[-2]
    # A link, as in the Hugging Face cache: renaming the file itself would change its ctime, by which a source is known.
    blob = shard.rename(tmp_path / "blob")
    shard.symlink_to(blob)
    job = Presharder(own, tmp_path / "a", LAYOUT)
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        job.run()
    assert all(json.loads((tmp_path / "a" / UNFINISHED).read_text())["checksums"].values())
    shard.symlink_to(blob)
    Presharder(own, tmp_path / "a", LAYOUT).run()
    for path in (tmp_path / "a" / "weights").iterdir():
        assert path.read_bytes() == (whole / "weights" / path.name).read_bytes()


def test_files_for_another_model_or_layout_are_refused(
    source: Path, thinking: Path, finished: Path, tmp_path: Path
) -> None:
    """`check_made_for` needs no checkpoint."""
    config = KimiK2Config.from_pretrained(source)
    with pytest.raises(MissingShardError, match="not finished"):
        check_made_for(tmp_path, config, LAYOUT)
    check_made_for(finished, config, LAYOUT)
    for other in (Layout(1, 4), Layout(2, 2, experts="blockwise"), Layout(2, 2, experts="tiles")):
        with pytest.raises(ConfigError, match=MANIFEST):
            check_made_for(finished, config, other)
    with pytest.raises(ConfigError, match="another configuration"):
        check_made_for(finished, KimiK2Config.from_pretrained(thinking), LAYOUT)
    with pytest.raises(ConfigError, match=r"other options .*experts \w+, now bf16"):
        Presharder(source, finished, Layout(2, 2, experts="bf16")).run()


def test_cuts_of_a_preset_are_shown(fp8: Path, tmp_path: Path) -> None:
    preset = tmp_path / "four.yaml"
    preset.write_text("like: trn2-tp32-ep2\ntp_degree: 4\nmoe_tp_degree: 2\n")
    shown = kimi("inspect", fp8, "--preset", preset, "--json", status=None)
    assert any(row["cut"] == "dim 2 / 2, stride 2, experts / 2" for row in json.loads(shown.output))


def test_a_preset_is_a_layout(fp8: Path, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(
        "instance: trn2.48xlarge\nexperts: blockwise\ntp_degree: 2\nmoe_tp_degree: 1\nmoe_ep_degree: 2\n"
        "batch_size: 1\nseq_len: 64\nmax_context_length: 64\n"
    )
    named = "convert", fp8, tmp_path / "named", "--preset", tmp_path / "two.yaml"
    kimi(*named)
    kimi("convert", fp8, tmp_path / "spelled", "--tp", "1", "--ep", "2")
    for path in (tmp_path / "named" / "weights").iterdir():
        assert path.read_bytes() == (tmp_path / "spelled" / "weights" / path.name).read_bytes()
    both = kimi(*named, "--tp", "4", status=2)
    assert "--tp" in both.output


def test_the_disk_begins_before_a_layer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presharder, "_EARLY", 10)
    begun, held = Semaphore(0), Semaphore(0)

    def sync() -> None:
        begun.release()
        held.acquire()

    file = SimpleNamespace(sync=sync)
    with presharder.Flusher([file]) as flushing:  # type: ignore[list-item]
        for count in (4, 6, 11, 11):  # one flush at the second, none more while it lasts
            flushing.wrote(count)
        assert begun.acquire(timeout=10)
        held.release(2)
        flushing.wait()
    assert not begun.acquire(blocking=False)


def manifest_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    return content


def resign(directory: Path, content: dict[str, Any]) -> None:
    rest = {name: value for name, value in content.items() if name != "sha256"}
    content["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(content))


def test_checksums_are_those_of_the_libraries(whole: Path) -> None:
    content = manifest_of(whole)
    assert content["checksum"] == "xxh3_128"
    for name, sums in content["checksums"].items():
        path = whole / "weights" / name
        header, data = header_bytes(path), path.read_bytes()
        entries = json.loads(header[8:])
        assert set(entries) - {"__metadata__"} == set(sums)
        for tensor, digest in sums.items():
            first, last = entries[tensor]["data_offsets"]
            assert digest == xxhash.xxh3_128(data[len(header) + first : len(header) + last]).hexdigest()


@pytest.mark.parametrize("kind", ["sha256", 3, ["xxh3_128"], None])
def test_another_kind_is_named(source: Path, finished: Path, kind: object) -> None:
    resign(finished, {**manifest_of(finished), "checksum": kind})
    for file in (MANIFEST, UNFINISHED):
        with pytest.raises(CorruptHeaderError, match=r"checksum: expected xxh3_128, got .*; convert again") as caught:
            Presharder(source, finished, LAYOUT).run()
        assert caught.value.file == str(finished / file)
        if file == MANIFEST:
            (finished / MANIFEST).rename(finished / UNFINISHED)


@pytest.mark.parametrize("before", [
    {"decode": "kernels"}, {"decode": None, "early_router": True}, {"decode": None, "spmd_rank": True},
])  # fmt: skip
def test_a_form_of_decode_that_is_no_more_is_named(source: Path, finished: Path, before: dict[str, Any]) -> None:
    config, layout, content = KimiK2Config.from_pretrained(source), LAYOUT, manifest_of(finished)
    given = {**content["made_from"]["options"], **before}
    content["made_from"]["options"] = {name: value for name, value in given.items() if value is not None}
    resign(finished, content)
    uses = (
        partial(check_made_for, finished, config, layout), Presharder(source, finished, layout).run,
        partial(made_layout, finished),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(ConfigError, match="; convert again") as caught:
            use()
        assert caught.value.field == list(before)[-1]


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2, target="cuda", experts="stored")], ids=["neuron", "cuda"])
def test_tower_is_kept_and_verified(k25_int4: Path, tmp_path: Path, layout: Layout) -> None:
    stored = tensors_of(k25_int4)
    expected = {name: tensor for name, tensor in stored.items() if not name.startswith("language_model.")}
    done: list[int] = []
    manifest = Presharder(k25_int4, tmp_path, layout, on_bytes=done.append).run()
    assert sum(done) == sum(tensor.nbytes for tensor in stored.values())
    written = load_file(tmp_path / VISION_FILE)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    config = KimiK2Config.from_pretrained(k25_int4)
    with open_tower(tmp_path) as read:
        state = VisionModel.loaded(config, read, dtype=torch.bfloat16, device="cpu").state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    assert not list(faults(tmp_path))

    whole = (tmp_path / VISION_FILE).read_bytes()
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    (tmp_path / VISION_FILE).write_bytes(damaged)
    assert [type(fault) for fault in faults(tmp_path)] == [CheckpointError]
    with pytest.raises(CheckpointError, match="convert --verify-output"), open_tower(tmp_path) as read:
        list(map(read, expected))
    (tmp_path / VISION_FILE).unlink()
    assert [type(fault) for fault in faults(tmp_path)] == [MissingShardError]
    Presharder(k25_int4, tmp_path, layout).run()
    assert (tmp_path / VISION_FILE).read_bytes() == whole
    assert load_manifest(tmp_path) == manifest


def test_models_without_a_tower_have_no_such_file(thinking: Path, tmp_path: Path) -> None:
    assert "vision" not in Presharder(thinking, tmp_path, Layout(1)).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST, "weights"]
