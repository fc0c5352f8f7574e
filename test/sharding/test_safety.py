"""What a user can do to a conversion: start it twice, change its source, damage its files. It is right, or an error."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
from forked import python
from safetensors.torch import load_file, save_file

from kimi_k2.checkpoint.index import header_bytes
from kimi_k2.errors import CheckpointError, ConfigError, CorruptHeaderError, KimiK2Error
from kimi_k2.files import LOCK, DirectoryLock
from kimi_k2.sharding.experts import ConversionError
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import MANIFEST, UNFINISHED
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import faults

CORRUPTIONS = int(os.environ.get("KIMI_K2_DRAWS", "40"))
POINTS = int(os.environ.get("KIMI_K2_DRAWS", "7"))
LAYOUT = Layout(2, 2)
CONVERT = """
import sys
import torch
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
torch.set_num_threads(1)
job = Presharder(sys.argv[1], sys.argv[2], Layout(2, 2, experts=sys.argv[3]))
print("ready", flush=True)
sys.stdin.read()
job.run()
"""


def weights_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((directory / "weights").iterdir())}


class StopError(Exception):
    """Stands for a kill between two layers."""


def stopped(source: Path, output: Path, layers: int = 1, *, verify_source: bool = False) -> None:
    """A conversion that ended after that many layers."""
    seen = []

    def stop(layer: int, _: object) -> None:
        seen.append(layer)
        if len(seen) > layers:
            raise StopError

    with pytest.raises(StopError):
        Presharder(source, output, LAYOUT, verify_source=verify_source, on_layer=stop).run()
    assert (output / UNFINISHED).exists()
    assert not (output / MANIFEST).exists()


# -- several at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [("blockwise",) * 2, ("blockwise", "bf16", "per_channel", "blockwise")])
def test_converters_started_at_once(source: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    command = [*python(), "-c", CONVERT, str(source), str(tmp_path / "out")]
    jobs = [
        subprocess.Popen([*command, experts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for experts in options
    ]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.close()
        job.stdin = None
    said = [job.communicate()[1].decode() for job in jobs]
    first = json.loads((tmp_path / "out" / MANIFEST).read_text())["made_from"]["options"]["experts"]
    for experts, job, words in zip(options, jobs, said, strict=True):
        # Whoever came late finds the same work done, or is refused by name; nobody else says it is well.
        refused = "another process is writing here: " in words or "other options" in words
        assert job.returncode == 0 or refused, words
        assert job.returncode != 0 or experts == first
    assert any(job.returncode == 0 for job in jobs)
    Presharder(source, tmp_path / "alone", Layout(2, 2, experts=first)).run()
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "alone")


def test_the_lock_names_its_holder_and_goes_with_it(tmp_path: Path) -> None:
    held, named = DirectoryLock(tmp_path), rf"process {os.getpid()} on .* since 20"
    with held, pytest.raises(CheckpointError, match=named), DirectoryLock(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()
    (tmp_path / LOCK).write_text("left by a kill")
    with DirectoryLock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


def test_a_file_that_its_holder_removed_in_between_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lock would be of a file that is gone, beside which a third process makes its own."""
    locked: list[int] = []
    flock = fcntl.flock

    def removed_first(fd: int, operation: int) -> None:
        if not locked:
            (tmp_path / LOCK).unlink()
        locked.append(fd)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with DirectoryLock(tmp_path):
        assert len(locked) == 2
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
        with pytest.raises(CheckpointError, match=f"another process is writing here: process {os.getpid()} on"):
            DirectoryLock(tmp_path).__enter__()
    assert not (tmp_path / LOCK).exists()


def test_a_file_where_a_directory_is_meant(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        Presharder(source, tmp_path / "out", LAYOUT).run()


# -- the source changes ------------------------------------------------------------------------------------------


def changed_expert(source: Path) -> Path:
    """Other values in one expert of the last layer: the same header and size."""
    shard = source / "model-3-of-3.safetensors"
    header = header_bytes(shard)
    start, _ = json.loads(header[8:])["model.layers.2.mlp.experts.1.up_proj.weight"]["data_offsets"]
    flip(shard, len(header) + start + 3)
    return shard


def touched(source: Path) -> Path:
    shard = source / "model-1-of-3.safetensors"
    os.utime(shard, ns=(1, 1))
    return shard


def put_back(source: Path) -> Path:
    """Other values under the time of before: ctime tells."""
    shard = source / "model-3-of-3.safetensors"
    before = shard.stat()
    flip(shard, -3)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert shard.stat().st_mtime_ns == before.st_mtime_ns
    return shard


def replaced(source: Path) -> Path:
    """The same bytes and times in another file."""
    shard = source / "model-2-of-3.safetensors"
    shutil.copy2(shard, source / "copy")
    (source / "copy").replace(shard)
    return shard


def resized(source: Path) -> Path:
    """A longer header."""
    shard = source / "model-1-of-3.safetensors"
    save_file(load_file(shard), shard, metadata={"format": "pt", "more": "words"})
    return shard


def reordered(source: Path) -> Path:
    """The same tensors at other offsets: the header differs, the size does not."""
    shard = source / "model-2-of-3.safetensors"
    data = bytearray(shard.read_bytes())
    header = header_bytes(shard)
    entries = json.loads(header[8:])
    names = [name for name in entries if name.endswith("layernorm.weight") and entries[name]["shape"] == [256]][:2]
    entries[names[0]], entries[names[1]] = entries[names[1]], entries[names[0]]
    text = json.dumps(entries, separators=(",", ":")).encode()
    data[8 : len(header)] = text + b" " * (len(header) - 8 - len(text))
    shard.write_bytes(data)
    return shard


@pytest.mark.parametrize("change", [changed_expert, touched, put_back, replaced, resized, reordered])
@pytest.mark.parametrize("when", ["unfinished", "finished"])
def test_another_source_is_not_mixed_in(
    source: Path, tmp_path: Path, change: Callable[[Path], Path], when: str
) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))
    if when == "unfinished":
        stopped(own, tmp_path / "out")
    else:
        Presharder(own, tmp_path / "out", LAYOUT).run()
    shard = change(own)
    with pytest.raises(ConfigError, match=re.escape(shard.name)):
        Presharder(own, tmp_path / "out", LAYOUT).run()


def test_hashed_bytes_decide_where_both_runs_have_them(source: Path, whole: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))
    stopped(own, tmp_path / "out", verify_source=True)
    moved = Path(shutil.copytree(own, tmp_path / "moved"))
    with pytest.raises(ConfigError, match="--verify-source compares its bytes"):
        Presharder(moved, tmp_path / "out", LAYOUT).run()
    changed = Path(shutil.copytree(own, tmp_path / "changed"))
    shard = changed_expert(changed)
    with pytest.raises(ConfigError, match=re.escape(f"{shard.name} has other")):
        Presharder(changed, tmp_path / "out", LAYOUT, verify_source=True).run()
    Presharder(moved, tmp_path / "out", LAYOUT, verify_source=True).run()
    assert weights_of(tmp_path / "out") == weights_of(whole)


def test_a_source_written_to_meanwhile_is_found(source: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))

    def touch(layer: int, problem: ConversionError | None) -> None:
        if layer == 0:
            touched(own)

    job = Presharder(own, tmp_path / "out", LAYOUT, on_layer=touch)
    with pytest.raises(CheckpointError, match="changed while it was being converted"):
        job.run()
    assert not (tmp_path / "out" / MANIFEST).exists()


# -- what an earlier run left ------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def partial(output: Path, rank: int) -> Path:
    return output / "weights" / f"tp{rank}_sharded_checkpoint.safetensors.partial"


LEFT_BEHIND: dict[str, Callable[[Path], object]] = {
    "partial removed": lambda out: partial(out, 1).unlink(),
    "all partials removed": lambda out: list(map(Path.unlink, (partial(out, rank) for rank in range(4)))),
    "partial truncated": lambda out: os.truncate(partial(out, 2), 5000),
    "partial extended": lambda out: os.truncate(partial(out, 2), 50_000_000),
    "header damaged": lambda out: flip(partial(out, 0), 40),
    "finished bytes damaged": lambda out: flip(partial(out, 3), 20_000),
    "nothing": lambda out: None,
    "a replacement begun": lambda out: (out / f"{UNFINISHED}.partial").write_bytes(b'{"made_from": \xff'),
    "a finished name already": lambda out: partial(out, 0).rename(str(partial(out, 0)).removesuffix(".partial")),
}


@pytest.mark.parametrize("damage", LEFT_BEHIND)
def test_resuming_over_damage_gives_the_right_files(source: Path, whole: Path, tmp_path: Path, damage: str) -> None:
    stopped(source, tmp_path, layers=2)
    LEFT_BEHIND[damage](tmp_path)
    again = list[int]()
    Presharder(source, tmp_path, LAYOUT, on_layer=lambda layer, _: again.append(layer)).run()
    assert weights_of(tmp_path) == weights_of(whole)
    assert not (tmp_path / UNFINISHED).exists()
    if damage in ("nothing", "a replacement begun"):  # three of the four are not made again
        assert len(again) == 1
    assert (tmp_path / MANIFEST).read_bytes() == (whole / MANIFEST).read_bytes()


def test_what_is_said_of_finished_layers_is_refused_where_it_is_damaged(source: Path, tmp_path: Path) -> None:
    stopped(source, tmp_path)
    flip(tmp_path / UNFINISHED, -200)
    with pytest.raises(CorruptHeaderError, match=rf"{UNFINISHED}.*(own checksum differs|not valid JSON)"):
        Presharder(source, tmp_path, LAYOUT).run()


MENDED: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "truncated": lambda path: os.truncate(path, 1000),
    "header": lambda path: flip(path, 100),
}


@pytest.mark.parametrize("damage", MENDED)
def test_a_finished_conversion_is_made_whole(source: Path, whole: Path, finished: Path, damage: str) -> None:
    path = finished / "weights" / "tp2_sharded_checkpoint.safetensors"
    other = finished / "weights" / "tp1_sharded_checkpoint.safetensors"
    before = other.stat().st_mtime_ns
    MENDED[damage](path)
    Presharder(source, finished, LAYOUT).run()
    assert weights_of(finished) == weights_of(whole)
    assert other.stat().st_mtime_ns == before
    assert list(faults(finished)) == []


# How often a conversion of this source makes each call; every one is reached.
CALLS = {"posix_fallocate": 4, "pwritev": 60, "fdatasync": 8, "replace": 5, "fsync": 3, "ftruncate": 4, "pread": 20}


@pytest.mark.parametrize("point", range(POINTS))
@pytest.mark.parametrize("end", ["EIO", "ENOSPC", "kill"])
def test_an_end_at_a_drawn_call(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int, end: str
) -> None:
    """An error of the disk, which names its file, or SIGKILL, at a call that a conversion makes; then it runs again."""
    chooser, calls = random.Random(f"{end} {point}"), 0
    name = list(CALLS)[point % len(CALLS)]
    last, output, real = chooser.randrange(CALLS[name]), tmp_path / "out", getattr(os, name)
    if chooser.random() < 0.4:
        stopped(source, output)  # it ends while it is taken up again

    def ends(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls > last:
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, end)
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, name, ends)
    if end == "kill":
        job = get_context("fork").Process(target=lambda: Presharder(source, output, LAYOUT).run())
        job.start()
        job.join()
        ended = job.exitcode == -signal.SIGKILL
    else:
        try:
            Presharder(source, output, LAYOUT).run()
            ended = False
        except CheckpointError as error:
            ended = True
            assert error.file is not None and os.strerror(getattr(errno, end)) in str(error)
            assert end == "EIO" or name in ("ftruncate", "pread") or "make room" in str(error)
            assert Path(error.file).is_relative_to(output) or Path(error.file).is_relative_to(source)
    monkeypatch.undo()
    assert ended and not (output / MANIFEST).exists()
    Presharder(source, output, LAYOUT).run()
    assert weights_of(output) == weights_of(whole)
    assert list(faults(output)) == []


def test_space_is_compared_before_the_first_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(CheckpointError, match=r"needs 4,[\d,]+ bytes more, 1,000,000 are free"):
        Presharder(source, tmp_path, LAYOUT).run()
    assert not list((tmp_path / "weights").iterdir())


def test_a_failed_reservation_is_given_back(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files before it too: nothing in them is of use."""
    reserve, sizes = os.posix_fallocate, list[int]()

    def third_fails(descriptor: int, start: int, size: int) -> None:
        sizes.append(size)
        if len(sizes) == 3:
            raise OSError(28, "No space left on device")
        reserve(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", third_fails)
    with pytest.raises(CheckpointError, match="cannot reserve"):
        Presharder(source, tmp_path, LAYOUT).run()
    assert len(sizes) == 3
    assert not list((tmp_path / "weights").iterdir())


# -- damage to finished files ------------------------------------------------------------------------------------


def corrupt(directory: Path, chooser: random.Random) -> tuple[str, set[str]]:
    """One drawn corruption: its kind, and the names of which `verify` must say one."""
    files = sorted((directory / "weights").iterdir())
    path = chooser.choice(files)
    entries = json.loads(header_bytes(path)[8:])
    tensor = chooser.choice(sorted(set(entries) - {"__metadata__"}))
    other = chooser.choice([file for file in files if file != path])
    kinds = "bytes", "missing", "extra", "swapped", "truncated", "longer", "header bytes", "header length", "manifest"
    kind = chooser.choice(kinds)
    if kind == "bytes":
        start, end = entries[tensor]["data_offsets"]
        flip(path, len(header_bytes(path)) + chooser.randrange(start, end))
    elif kind == "missing":
        path.unlink()
        tensor = path.name
    elif kind == "extra":
        shutil.copy(path, path.with_name(chooser.choice(["tp99_sharded_checkpoint.safetensors", "notes.txt"])))
        return kind, {"tp99_sharded_checkpoint.safetensors", "notes.txt"}
    elif kind == "swapped":
        path.rename(directory / "held")
        other.rename(path)
        (directory / "held").rename(other)
        return kind, {path.name, other.name}
    elif kind == "truncated":
        os.truncate(path, chooser.randrange(path.stat().st_size))
        tensor = path.name
    elif kind == "longer":
        with path.open("ab") as file:
            file.write(b"\0" * chooser.randrange(1, 100))
    elif kind == "header bytes":
        flip(path, chooser.randrange(8, len(header_bytes(path))))
    elif kind == "header length":
        flip(path, chooser.randrange(8))
    else:
        flip(directory / MANIFEST, chooser.randrange((directory / MANIFEST).stat().st_size))
        return kind, {MANIFEST}
    return kind, {tensor, path.name}


def test_verify_names_every_drawn_corruption(whole: Path, tmp_path: Path) -> None:
    """`KIMI_K2_DRAWS=200 pytest -k corruption` draws as many as the issue asks for."""
    chooser, seen = random.Random(11), dict[str, int]()
    assert list(faults(whole)) == []
    for number in range(CORRUPTIONS):
        directory = Path(shutil.copytree(whole, tmp_path / "damaged"))
        kind, names = corrupt(directory, chooser)
        seen[kind] = seen.get(kind, 0) + 1
        try:
            found = [str(fault) for fault in faults(directory)]
        except KimiK2Error as error:
            found = [str(error)]
        assert any(name in said for said in found for name in names), (number, kind, names, found)
        shutil.rmtree(directory)
    print(f"\n{CORRUPTIONS} corruptions found: {seen}")


def test_an_old_manifest_is_refused(source: Path, finished: Path) -> None:
    content = json.loads((finished / MANIFEST).read_text())
    del content["tensors"]
    (finished / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CorruptHeaderError, match="not a manifest of this version: no 'tensors'"):
        list(faults(finished))
    with pytest.raises(CorruptHeaderError, match="not a manifest of this version"):
        Presharder(source, finished, LAYOUT).run()


def test_looking_through_a_finished_conversion_writes_nothing(source: Path, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    time.sleep(0.01)
    (finished / UNFINISHED).write_text("left by a kill between the two")
    assert Presharder(source, finished, LAYOUT).run() == json.loads((finished / MANIFEST).read_text())
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()} == before
