"""The commands of docs/h200.md: run here with two CPU ranks for eight GPUs, and on a GPU as far as one can.

Only these words are replaced: number of ranks, device, paths and layers; and generations are cut short.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import kimi
from forked import python
from processes import KIMI, TORCHRUN, run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "h200.md"
ShellCommands = Callable[[str], list[list[str]]]
WORDS = {"8": "2", "cuda": "cpu", "0,1,30,60": "0,1"}
TIMERS = (["bench", "kernels"], ["bench", "experts"], ["bench", "tune"])
SHORT = {
    "generate": ["--max-new-tokens", "2"],
    "bench": ["--output-lengths", "2", "--prompt-lengths", "4", "--runs", "1"],
    "capture": ["--prompt-length", "5", "--steps", "1"],
}


@pytest.fixture
def page_commands(shell_commands: ShellCommands) -> list[list[str]]:
    return shell_commands(PAGE.read_text(encoding="utf-8"))


def test_on_two_cpu_ranks(page_commands: list[list[str]], wide: Path, tmp_path: Path) -> None:
    paths = {
        "/models/Kimi-K2-Instruct-0905": str(wide),
        "/ranks": str(tmp_path / "ranks"),
        "/golden": str(tmp_path / "g"),
    }
    ran = []
    for words in page_commands:
        if "kimi-k2" not in words:
            continue
        at = words.index("kimi-k2")
        arguments = [paths.get(word, WORDS.get(word, word)) for word in words[at + 1 :]]
        if arguments[0] == "convert":  # the target's name is no device
            arguments[arguments.index("--target") + 1] = "cuda"
        called = arguments[1] if arguments[0] == "parity" else arguments[0]
        if arguments[:2] in TIMERS:
            continue  # times kernels: see below
        arguments += SHORT.get(called, [])
        if words[0] == "torchrun":
            done = run(*TORCHRUN, *KIMI, *arguments, cwd=tmp_path)
            assert done.returncode == 0, (arguments, done.stdout[-2000:], done.stderr[-2000:])
        else:
            kimi(*arguments)
        ran.append(called)
    assert ran == ["convert", "generate", "bench", "capture"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tunes for minutes on a GPU")
def test_tuning_and_timing_say_that_they_need_a_gpu(page_commands: list[list[str]]) -> None:
    commands = [words[1:] for words in page_commands if words[1:3] in TIMERS]
    assert len(commands) == 3
    for words in commands:
        assert "no CUDA device" in str(kimi(*words, status=1).exception)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_one_gpu(page_commands: list[list[str]]) -> None:
    stand_in = next(words for words in page_commands if "--stand-in" in words)
    done = run(*python(), *stand_in[1:], "--layers", "2", cwd=ROOT)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
