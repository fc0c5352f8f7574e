"""The error handler, the hub's cache, and that help imports nothing heavy."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from command import kimi
from forked import python

from kimi_k2.checkpoint.hub import resolve_checkpoint
from kimi_k2.cli import main
from kimi_k2.cli.errors import errors_handled
from kimi_k2.errors import CheckpointError, ConfigError


def ended(action: Callable[[], object]) -> int:
    """Exit status of what runs under the handler."""
    with pytest.raises(SystemExit) as exit_, errors_handled():
        action()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def throw(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConfigError("expected 3", field="x"), "error: field 'x': expected 3\n"),
        (FileNotFoundError(2, "No such file or directory", "/a/b"), "error: /a/b: No such file or directory\n"),
        (OSError(28, "No space left on device"), "error: No space left on device\n"),
        (MemoryError(), "error: out of memory\n"),
    ],
)
def test_expected_errors_are_a_line(error: Exception, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(throw(error)) == 1
    assert capsys.readouterr().err == says


def test_a_bug_leaves_its_traceback_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert ended(throw(ZeroDivisionError("seven"))) == 70
    shown = capsys.readouterr().err
    assert "a bug in kimi-k2: ZeroDivisionError: seven" in shown
    assert len(shown.splitlines()) == 1
    (file,) = tmp_path.iterdir()
    assert str(file) in shown
    assert "Traceback" in file.read_text()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))  # or its disk is full
    assert ended(throw(ZeroDivisionError("eight"))) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("plan kimi-k2.5 --chart {out}/chart.PNG", "chart.PNG"),
        ("parity capture {fp8} {out} --layers 0", "golden.safetensors"),
        ("bench {fp8} --prompt-lengths 4 --output-lengths 2 --runs 1 --out {out}", "tpot.png"),
    ],
)
def test_a_full_disk_is_named_and_keeps_the_file_of_before(
    fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, file: str
) -> None:
    (tmp_path / file).write_text("of before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
        assert ended(partial(main, arguments=[word.format(fp8=fp8, out=tmp_path) for word in command.split()])) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"error: {tmp_path / file}.partial: File too large\n" in capsys.readouterr().err
    assert (tmp_path / file).read_text() == "of before"


def test_an_interrupted_conversion_says_how_to_go_on(
    fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "kimi_k2.sharding.presharder.Presharder"
    convert = partial(main, "convert", arguments=[str(fp8), str(tmp_path), "--tp", "2"])
    with monkeypatch.context() as interrupted:
        interrupted.setattr(f"{job}._durable", lambda *_, **__: throw(KeyboardInterrupt())())
        assert ended(convert) == 130
    assert "interrupted: run it again to resume" in capsys.readouterr().err
    assert ended(convert) == 0


def test_no_memory_on_a_gpu_says_what_is_needed_and_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 3.25 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.06 GiB is"
        " free. Including non-PyTorch memory, this process has 78.04 GiB memory in use."
    )
    error.add_note("the weights have 61.0 GB")
    assert ended(throw(error)) == 1
    assert capsys.readouterr().err == (
        "error: out of memory on a GPU: Tried to allocate 3.25 GiB;"
        " GPU 0 has a total capacity of 79.11 GiB of which 1.06 GiB is free; the weights have 61.0 GB\n"
    )


def test_a_closed_pipe_is_quiet(fp8: Path) -> None:
    command = [*python(), "-c", "from kimi_k2.cli import app, main; main()", "inspect", str(fp8)]
    with subprocess.Popen([*command, "--tensors"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode not in (0, 70)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kimi_k2.cli import main\n"
        "heavy = ('torch', 'numpy', 'transformers', 'matplotlib', 'huggingface_hub', 'jinja2', 'tiktoken')\n"
        "for line in ('--help', '--version', 'generate --help', 'bench sweep --help'):\n"
        "    try:\n"
        "        main(arguments=line.split())\n"
        "    except SystemExit as end:\n"
        "        print(line, end.code, [name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line[-5:] for line in done.stderr.splitlines()] == 4 * [" 0 []"], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    environment = {**os.environ, "_KIMI_K2_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "kimi-k2 in"}
    environment |= {"COMP_WORDS": "kimi-k2 in", "COMP_CWORD": "1", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    command = [sys.executable, "-c", "from kimi_k2.cli import app, main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "inspect" in done.stdout


def test_a_cached_repository_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fp8: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    name = "moonshotai/Kimi-K2-Instruct-0905"
    with pytest.raises(CheckpointError, match=f"{name}: no such directory.*--download"):
        resolve_checkpoint(name)
    with pytest.raises(CheckpointError, match=r"a/b\.git: cannot be downloaded: "):
        resolve_checkpoint("a/b.git")
    commit = "0" * 40
    repository = tmp_path / "models--moonshotai--Kimi-K2-Instruct-0905"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(fp8)
    assert (resolve_checkpoint(name) / "config.json").samefile(fp8 / "config.json")
    assert resolve_checkpoint(fp8) == fp8
    assert resolve_checkpoint("nothing-like-that") == Path("nothing-like-that")
    for command in (
        ["plan", name, "--preset", "h200-tp1", "--json"],
        ["convert", name, "--dry-run", "--tp", "2"],
        ["inspect", name],
    ):
        kimi(*command)


def test_a_file_cut_short_while_it_is_mapped(bf16: Path, tmp_path: Path) -> None:
    shard = shutil.copy(next(bf16.glob("*.safetensors")), tmp_path / "model.safetensors")
    reads = (
        "import os, sys; from kimi_k2.checkpoint.reader import CheckpointReader; from kimi_k2.cli.errors import *\n"
        "with errors_handled():\n"
        "    reader = CheckpointReader(sys.argv[1])\n"
        "    tensor = reader.get(max(reader.tensors, key=lambda name: reader.tensors[name].nbytes), check=False)\n"
        "    os.truncate(sys.argv[2], 0); tensor.float().sum()\n"
    )
    done = subprocess.run([*python(), "-c", reads, tmp_path, shard], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {shard}: a mapped page is not there: the file was cut short\n",
    )
