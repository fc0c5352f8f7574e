"""Fixtures shared by all tests: tiny checkpoints in every published format, written once a test run and worker."""

from __future__ import annotations

import functools
import re
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
import typer.main
import typer.testing

from kimi_k2.kernels.common import hardware
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

# Typer reads all commands' signatures anew at each call, for a tenth of a second.
for _module, _name in ((typer.main, "get_command"), (typer.testing, "_get_command")):
    setattr(_module, _name, functools.cache(getattr(_module, _name)))

BLOCK = re.compile(r"^ *```(?:sh|bash)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skipped tests by reason, a line each; `-rs` names them."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count:4}: {reason.splitlines()[0][:100]}")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _capability_asked_anew() -> None:
    """Tests stand in for GPUs of several kinds."""
    hardware.capability.cache_clear()


@pytest.fixture
def no_hang() -> Iterator[None]:
    """What waits for ever, such as for a pipe's writer, fails instead."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise AssertionError("still running after 60 s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint directories by name: K2 in FP8 and BF16, Thinking in INT4, K2.5 (prefixed names) in INT4."""
    root = tmp_path_factory.mktemp("checkpoints")
    configs = {
        "fp8": tiny_config("kimi-k2-instruct-0905"),
        "bf16": with_format(tiny_config("kimi-k2-instruct"), "bf16"),
        "thinking": tiny_config("kimi-k2-thinking"),
        "k2.5": tiny_config("kimi-k2.5"),
    }
    for seed, (name, config) in enumerate(configs.items()):
        write_synthetic_checkpoint(root / name, config, seed=seed)
    return {name: root / name for name in configs}


def _checkpoint(name: str) -> Callable[..., Path]:
    """A fixture of one of them."""
    return pytest.fixture(lambda checkpoints: checkpoints[name], scope="session")


fp8, bf16, thinking, k25_int4 = map(_checkpoint, ("fp8", "bf16", "thinking", "k2.5"))


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FP8 checkpoint whose projections are wide enough for two ranks to cut them at block borders."""
    directory = tmp_path_factory.mktemp("wide")
    sizes = {"moe_intermediate_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "v_head_dim": 64}
    sizes |= {"num_key_value_heads": 8, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "num_hidden_layers": 2}
    write_synthetic_checkpoint(directory, tiny_config("kimi-k2-instruct-0905", **sizes), seed=9)
    return directory


def _shell_commands(text: str) -> list[list[str]]:
    """Command lines of the shell blocks, split into words, comments and variables in front left out."""
    found = []
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z0-9_]+=.*", words[0]):
                words.pop(0)
            if words:
                found.append(words)
    return found


@pytest.fixture(scope="session")
def shell_commands() -> Callable[[str], list[list[str]]]:
    """Reads the command lines of a document's shell blocks."""
    return _shell_commands
