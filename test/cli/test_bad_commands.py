"""Bad command lines: each ends with a line that says what is wrong, an exit status that is not 0, and no traceback."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from kimi_k2.cli import app, main
from kimi_k2.cli.errors import BUG

INTEGER = ["x", "", "1.5", "1e3", "-99999999999999999999", "99999999999999999999", "0x10", "٣ x"]
POSITIVE = [*INTEGER, "0", "-1"]
NUMBER = ["x", "", "nan", "inf", "-inf", "1e999", "-0.5"]
CHOICE = ["nope", "", "CPU ", "float16"]
# Where nothing can be written: no such device, a file as a directory, a name that is too long, a kernel's directory.
UNWRITABLE = ["/dev/null/x", "{file}/x", "{file}", "/proc/kimi-k2/x", "{tmp}/" + "n" * 300]
UNREADABLE = ["{tmp}/absent", "{tmp}/empty", "/dev/null", "{file}", "{tmp}/" + "n" * 300, "nobody/nothing-of-this-name"]
NO_FILE = ["{tmp}/absent", "{tmp}", "{garbage}", "/dev/null/x", "{nested}"]

SAMPLING = {
    "--max-new-tokens": [*POSITIVE, "9000", "1000000000000"],
    "--temperature": [*NUMBER, "1e-45"],
    "--top-p": [*NUMBER, "0", "1.5"],
    "--top-k": [*INTEGER, "-1"],
    "--seed": [*INTEGER, "-1", str(2**64)],
    "--stop": [""],
    "--dtype": CHOICE,
    "--kv-cache-dtype": CHOICE,
    "--backend": [*CHOICE, "cuda:1", "neuron"],
    "--min-p": [*NUMBER, "1.5"],
    "--repetition-penalty": [*NUMBER, "0", "2.5"],
    "--presence-penalty": ["x", "nan", "2.5", "-3"],
    "--frequency-penalty": ["x", "inf", "2.5", "-3"],
    "--style": CHOICE,
    "--tools": NO_FILE,
    "--messages": NO_FILE,
}
LAYOUT = {"--tp": [*POSITIVE, "7", "1000000007"], "--ep": [*POSITIVE, "7"], "--target": CHOICE, "--experts": CHOICE}
# A command that is right, the bad values of its options, and of its arguments by place.
COMMANDS: list[tuple[str, dict[str, list[str]], dict[int, list[str]]]] = [
    ("generate {fp8} -p x --max-new-tokens 1", {**SAMPLING, "--ranks": UNREADABLE}, {1: UNREADABLE}),
    ("chat {fp8}", {"--draft": UNREADABLE, "--draft-tokens": POSITIVE}, {1: UNREADABLE}),
    (
        "make-checkpoint {tmp}/new",
        {
            "--model": [*CHOICE, "../config", "kimi-k2.5.json"],
            "--format": CHOICE,
            "--seed": [*INTEGER, "-1"],
            "--set": ["", "x", "nope=3", "vocab_size=", "vocab_size=x", "vocab_size=300", "kv_lora_rank=0",
                      "num_hidden_layers=1000000000", "n_routed_experts=1000000000", "hidden_size=1e30",
                      "vocab_size=1000000000000000000", "hidden_size=nan", "rope_theta=inf", "rms_norm_eps=-1"],
        },
        {1: [*UNWRITABLE, "{fp8}", "{full}"]},
    ),
    ("inspect {fp8} --preset trn2-tp32-ep2", {"--preset": UNREADABLE},
     {1: UNREADABLE}),
    ("convert {fp8} {tmp}/out", LAYOUT, {1: UNREADABLE, 2: UNWRITABLE}),
    ("verify {fp8}", {}, {1: UNREADABLE}),
    (
        "plan kimi-k2.5",
        {
            "--preset": [*UNREADABLE, "nope", "h200-tp0", "h200-tp3", "h200-tp" + "9" * 30],
            "--max-model-len": [*POSITIVE, "1000000000000", "1e12"],
            "--batch-size": [*POSITIVE, "1000000000000000000000"],
            "--prompt-length": [*POSITIVE, "1000000000000"],
            "--hlo": UNREADABLE,
            "--chart": ["/dev/null/x.png", "{file}/x.png", "{tmp}", "{tmp}/x.nope", "{tmp}/absent/x.png"],
        },
        {1: [*UNREADABLE, "kimi-k9"]},
    ),
    (
        "compile kimi-k2.5 --preset trn2-tp32-ep2 --dry-run",
        {"--preset": [*UNREADABLE, "nope", "h200-tp8"]},
        {1: UNREADABLE},
    ),
    (
        "compile kimi-k2.5 --preset trn2-tp64-ep1-images --dry-run",
        {},
        {1: ["kimi-k2-instruct-0905"]},
    ),
    (
        "bench {fp8} --output-lengths 1 --runs 1 --out {tmp}/bench",
        {
            "--output-lengths": ["", ",", "x", "0", "-3", "1e3", "1,x"],
            "--prompt-lengths": ["", "x", "0"],
            "--batch-sizes": ["", "x", "0"],
            "--runs": POSITIVE,
            "--backend": CHOICE,
            "--dtype": CHOICE,
            "--out": UNWRITABLE,
            "--ranks": UNREADABLE,
        },
        {1: UNREADABLE},
    ),
    (
        "parity capture {fp8} {tmp}/golden --steps 1 --prompt-length 4",
        {
            "--prompt-length": [*POSITIVE, "99999", "1000000000000"],
            "--steps": [*POSITIVE, "99999", "1000000000000"],
            "--layers": ["", "x", "-1", "99", "1,,2"],
            "--seed": [*INTEGER, "-1"],
            "--backend": [*CHOICE, "neuron"],
            "--dtype": CHOICE,
            "--prompt": ["", "y" * 50_000],
            "--ranks": UNREADABLE,
        },
        {2: UNREADABLE, 3: UNWRITABLE},
    ),
    ("parity compare {tmp}/absent {fp8}", {"--dtype": CHOICE}, {2: UNREADABLE, 3: UNREADABLE}),
    ("bench profile --preset h200-tp8", {"--preset": UNREADABLE, "--layers": POSITIVE,
     "--kv-cache-dtype": CHOICE, "--contexts": ["x", "0", "3x", "x5", "1,,2", "2x0"]}, {}),
    ("bench tune", {"--shape": ["nope", ""], "--tokens": POSITIVE}, {}),
    ("doctor", {"--jason": ["x"]}, {}),
    ("nonsense", {"--x": ["y"]}, {}),
]  # fmt: skip


# Right options that the rest of the line leaves without a meaning: refused by name, before anything is read.
IDLE = [
    "generate {fp8} -p x --draft-tokens 5",
    "generate {fp8} -p x --preset nonsense",
    "chat {fp8} --max-model-len 5",
    "generate {fp8} -p x --raw --style k2.5",
    "generate {fp8} -p x --raw --no-thinking",
    "generate {fp8} -p x --backend neuron --on-cpu --ranks {tmp}",
    "bench {fp8} --compiled {tmp}",
    "generate {fp8} -p x --backend neuron --compiled {tmp} --dtype float64",
    "bench {fp8} --backend neuron --on-cpu --dtype bfloat16",
    "bench kernels --seed 3",
    "parity capture {fp8} {tmp}/golden --prompt x --prompt-length 9",
    "convert {fp8} {tmp}/out --preset trn2-tp32-ep2 --tp 4",
    "inspect {fp8} --preset trn2-tp32-ep2 --tensors",
    "plan kimi-k2.5 --gpus --draft llama",
    "plan kimi-k2.5 --all-presets --batch-size 4",
    "plan kimi-k2.5 --draft-tokens 4",
    "compile kimi-k2.5 --hlo-only --capture-layers 0",
    "compile kimi-k2.5 --dry-run --draft-tokens 4",
    "compile kimi-k2.5 --preset trn2-native-tp32-ep2 --hlo-only",
    "serve {fp8} --backend cpu --preset nonsense",
    "convert {fp8} --dry-run --verify-output",
    "compile kimi-k2.5 --dry-run --capture-layers 0",
]


def all_lines() -> list[list[str]]:
    """Every right command with one thing wrong."""
    lines = []
    for command, options, arguments in COMMANDS:
        base = command.split()
        for option, values in options.items():
            lines += [[*base, option, value] for value in values]
        for position, values in arguments.items():
            lines += [[*base[:position], value, *base[position + 1 :]] for value in values]
    return lines


@pytest.fixture
def names(fp8: Path, tmp_path: Path) -> dict[str, str]:
    """What stands for the braces: a checkpoint, and things that are not what is meant."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("the only copy")
    for name, content in (("file", "x"), ("garbage", "{garbage"), ("nested", "[" * 100_000)):
        (tmp_path / name).write_text(content)
    found = {name: str(tmp_path / name) for name in ("file", "garbage", "nested", "full")}
    return {**found, "fp8": str(fp8), "tmp": str(tmp_path)}


def run(line: list[str], names: dict[str, str]) -> int:
    """Exit status of the command, run here."""
    words = [word.format(**names) if re.search(r"\{\w+\}", word) else word for word in line]
    try:
        main(arguments=words)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
    return 0


def check(line: list[str], names: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with how a line ends; None if nothing is."""
    status = run(line, names)
    shown = capsys.readouterr()
    text = shown.out + shown.err
    for leftover in ("out", "new", "golden", "bench", "work"):
        shutil.rmtree(Path(names["tmp"]) / leftover, ignore_errors=True)
    if status in (0, BUG) or "Traceback" in text or not shown.err.strip():
        return f"{line}: status {status}: {text[-300:]!r}"
    return None


def test_idle_options(names: dict[str, str]) -> None:
    command = get_command(app)
    for line in IDLE:
        with pytest.raises(typer.BadParameter) as refused:
            command.main([word.format(**names) for word in line.split()], standalone_mode=False)
        assert refused.value.param_hint == re.findall(r"--\S+", line)[-1].replace("--no-", "--")


def test_lines(names: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, which takes minutes, with KIMI_K2_SLOW; else some that are drawn."""
    monkeypatch.setattr("sys.stdin", None)
    lines = all_lines()
    if not os.environ.get("KIMI_K2_SLOW"):
        lines = random.Random(14).sample(lines, 48)
    wrong = [found for line in lines if (found := check(line, names, capsys))]
    assert not wrong, "\n".join(wrong)
