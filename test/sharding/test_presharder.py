"""Conversion of tiny checkpoints: values against the plain model's, kills, damage, manifest."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace

import pytest
from forked import python
from typer.testing import CliRunner

from kimi_k2.cli import app
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, MissingShardError
from kimi_k2.sharding import presharder
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import JOURNAL, MANIFEST, check_made_for
from kimi_k2.sharding.presharder import Presharder

WORKER = """
import sys
import torch
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
torch.set_num_threads(1)
Presharder(sys.argv[1], sys.argv[2], Layout(2, 2)).run()
"""


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_disk_too_small_is_found_before_any_work(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The kernel's own refusal: a limit on the size of files stands for the end of the disk."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n" + WORKER
    command = [*python(), "-c", limited, str(checkpoints["fp8"]), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "CheckpointError" in done.stderr
    assert "cannot reserve" in done.stderr
    assert "run the same command again" in done.stderr
    assert not list((tmp_path / "out" / "weights").glob("*.safetensors"))
    Presharder(checkpoints["fp8"], tmp_path / "out", Layout(2, 2)).run()


def test_a_shard_that_goes_away_keeps_finished_layers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints["fp8"], source)
    job = Presharder(source, tmp_path / "a", Layout(2))
    shard = source / job.reader.index.shards[-2]
    # A link, as in the Hugging Face cache: renaming the file itself would change its ctime, by which a source is known.
    blob = shard.rename(tmp_path / "blob")
    shard.symlink_to(blob)
    job = Presharder(source, tmp_path / "a", Layout(2))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        job.run()
    assert len((tmp_path / "a" / JOURNAL).read_text().splitlines()) > 1
    shard.symlink_to(blob)
    Presharder(source, tmp_path / "a", Layout(2)).run()
    Presharder(source, tmp_path / "b", Layout(2)).run()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_other_options_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    Presharder(checkpoints["fp8"], tmp_path, Layout(2)).run()
    with pytest.raises(ConfigError, match=r"other options .*experts \w+, now bf16"):
        Presharder(checkpoints["fp8"], tmp_path, Layout(2, experts="bf16")).run()


def test_files_for_another_model_or_layout_are_refused_without_the_checkpoint(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    config = KimiK2Config.from_pretrained(checkpoints["fp8"])
    with pytest.raises(MissingShardError, match="not finished"):
        check_made_for(tmp_path, config, Layout(2))
    Presharder(checkpoints["fp8"], tmp_path, Layout(2)).run()
    check_made_for(tmp_path, config, Layout(2))
    others = (
        Layout(1, 2), Layout(2, experts="blockwise"), Layout(2, experts="tiles"),
        Layout(2, experts="tiles", decode="layers"),
    )  # fmt: skip
    for other in others:
        with pytest.raises(ConfigError, match=MANIFEST):
            check_made_for(tmp_path, config, other)
    with pytest.raises(ConfigError, match="another configuration"):
        check_made_for(tmp_path, KimiK2Config.from_pretrained(checkpoints["thinking"]), Layout(2))


def test_commands(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from kimi_k2.cli import app

    run = CliRunner().invoke
    options = ["--tp", "2", "--ep", "2"]
    assert run(app, ["convert", str(checkpoints["fp8"]), str(tmp_path), *options]).exit_code == 0
    assert run(app, ["verify", str(tmp_path)]).exit_code == 0
    dry = run(app, ["convert", "kimi-k2-instruct-0905", "--dry-run"]).output
    assert "1,029,173,249,888" in dry
    assert "extrapolated" in dry
    preset = tmp_path / "four.yaml"
    preset.write_text("like: trn2-tp32-ep2\ntp_degree: 4\nmoe_tp_degree: 2\n")
    rows = json.loads(run(app, ["inspect", str(checkpoints["fp8"]), "--preset", str(preset), "--json"]).output)
    assert any(row["cut"] == "dim 2 / 2, stride 2, experts / 2" for row in rows)
    assert run(app, ["convert", str(checkpoints["fp8"]), str(tmp_path), "--tp", "3"]).exit_code == 1


def test_a_preset_is_a_layout(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(
        "instance: trn2.48xlarge\nexperts: blockwise\ntp_degree: 2\nmoe_tp_degree: 1\nmoe_ep_degree: 2\n"
        "batch_size: 1\nseq_len: 64\nmax_context_length: 64\n"
    )
    named = ["convert", str(checkpoints["fp8"]), str(tmp_path / "named"), "--preset", str(tmp_path / "two.yaml")]
    assert CliRunner().invoke(app, named).exit_code == 0
    spelled = ["convert", str(checkpoints["fp8"]), str(tmp_path / "spelled"), "--tp", "1", "--ep", "2"]
    assert CliRunner().invoke(app, spelled).exit_code == 0
    for path in (tmp_path / "named" / "weights").iterdir():
        assert path.read_bytes() == (tmp_path / "spelled" / "weights" / path.name).read_bytes()
    both = CliRunner().invoke(app, [*named, "--tp", "4"])
    assert both.exit_code == 2
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
