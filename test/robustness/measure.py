"""Every malformed checkpoint with every command, each in a process of its own, with its CPU time and memory.

    python test/robustness/measure.py [MATCH]
    python test/robustness/measure.py --mechanisms [FIRST [COUNT [JOBS]]]

The second form draws checkpoints by mechanism, from seed FIRST (0) on, COUNT (300) of them, times six commands, in JOBS
(1) processes at once. It compares time and memory with the same command on the sound checkpoint, and what it prints.

A process is a fork of this one, which has imported everything: its time is what the command takes beyond the start of
Python. Memory is its peak, imports included. Prints what is wrong, and the worst figures.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from damage import private_copy
from mechanisms import MECHANISMS, drawn
from run_commands import COMMANDS, SIX, Ending, run
from test_malformed import KINDS

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

TIMEOUT = 60
# At most, of a kind beyond nothing, and of a drawn mechanism beyond the same command on the sound checkpoint.
MOST, MORE = (2.0, 400e6), (5.0, 500e6)


def in_child(
    command: str, checkpoint: Path, work: Path, meanwhile: Callable[[], object] | None = None
) -> tuple[Ending, float, int]:
    """How a command ends in a fork, its CPU seconds and its peak memory in bytes; killed after a minute."""
    said = work / "said"
    child = os.fork()
    if not child:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(work / "typed", os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0)
        signal.alarm(TIMEOUT)
        try:
            status = run(command, checkpoint, work / "out")
        except BaseException:
            status = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if meanwhile is not None:
        meanwhile()
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    ending = Ending(command, code, said.read_text(errors="replace"))
    shutil.rmtree(work / "out", ignore_errors=True)
    return ending, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


class Found(NamedTuple):
    """What many runs gave; figures are pairs with what took them."""

    faults: list[str]
    accepted: list[str]
    refused: list[str]
    seconds: list[tuple[float, str]]
    memory: list[tuple[float, str]]


def run_all(bases: dict[str, Path], top: Path, numbers: Sequence[int], drawing: bool, match: str) -> Found:
    """Kinds by number, or the faults of seeds, with their commands, beside the sound checkpoint."""
    work = Path(tempfile.mkdtemp(dir=top))
    shutil.copy(top / "typed", work)
    commands, limits = (SIX, MORE) if drawing else (COMMANDS, MOST)
    sound: dict[tuple[str, str], tuple[Ending, float, int]] = {}
    for base, directory in bases.items():
        for command in commands:
            checkpoint = private_copy(directory, work / "checkpoint")  # errors and tables name the same path
            sound[base, command] = in_child(command, checkpoint, work)
            assert sound[base, command][0].status == 0, sound[base, command][0]
            shutil.rmtree(checkpoint)
    found = Found([], [], [], [], [])
    for number in numbers:
        base = sorted(bases)[number // len(MECHANISMS) % len(bases)]
        kind = drawn(number, bases[base]) if drawing else KINDS[number]
        if match not in kind.name:
            continue
        base = kind.base or base
        for command in commands:
            checkpoint = private_copy(bases[base], work / "checkpoint")
            kind.damage(checkpoint)
            meanwhile = None if kind.meanwhile is None else partial(_later, number, kind.meanwhile, checkpoint)
            ending, seconds, peak = in_child(command, checkpoint, work, meanwhile)
            subprocess.run(["rm", "-rf", checkpoint], check=True)
            good, usual, held = sound[base, command]
            name = f"{number}, {base}, {kind.name}: {command}"
            if drawing:
                seconds, peak = seconds - usual, peak - held
            found.seconds.append((seconds, name))
            found.memory.append((peak, name))
            what = ending.fault(kind)
            if ending.status:
                found.refused.append(name)
            elif drawing and _shown(ending) != _shown(good):
                if kind.refused_by(command) is False:
                    what = f"says something else: {ending.said[-300:]!r}"
                else:
                    found.accepted.append(name)
            if seconds > limits[0] or peak > limits[1]:
                what = f"{seconds:.1f} s, {peak / 1e6:.0f} MB; {what}"
            if what:
                found.faults.append(f"{name}: {what}")
                print(found.faults[-1], flush=True)
    return found


def report(found: list[Found], drawing: bool) -> None:
    """Results that are others than the sound checkpoint's, the worst figures, and counts."""
    if drawing:
        print("\n".join(["accepted, with another result:", *sorted(name for one in found for name in one.accepted)]))
    for unit, factor, pairs in (("s", 1, [one.seconds for one in found]), ("MB", 1e6, [one.memory for one in found])):
        for figure, name in sorted((pair for some in pairs for pair in some), reverse=True)[:5]:
            print(f"{figure / factor:.2f} {unit}{' more' if drawing else ''}: {name}")
    runs, refused, faults = (
        sum(map(len, of)) for of in zip(*((one.seconds, one.refused, one.faults) for one in found), strict=True)
    )
    print(f"{runs} runs, {refused} refused, {faults} faults")


def _later(seed: int, damage: Callable[[Path], object], checkpoint: Path) -> None:
    time.sleep(random.Random(-seed).uniform(0, 0.3))
    damage(checkpoint)


def _shown(ending: Ending) -> str:
    """What it says, without times."""
    return re.sub(r"TTFT.*", "", ending.said)


def main() -> None:
    """Run and report."""
    torch.set_num_threads(1)
    drawing = "--mechanisms" in sys.argv
    numbers = [int(word) for word in sys.argv[2:5]] if drawing else []
    match = "" if drawing else "".join(sys.argv[1:2])
    work = Path(tempfile.mkdtemp(prefix="kimi-k2-malformed-"))
    try:
        bases = {name: work / name for name in ("fp8", "thinking", "bf16", "k2.5")}
        write_synthetic_checkpoint(bases["fp8"], tiny_config("kimi-k2-instruct-0905"), seed=0)
        write_synthetic_checkpoint(bases["bf16"], with_format(tiny_config("kimi-k2-instruct"), "bf16"), seed=1)
        write_synthetic_checkpoint(bases["thinking"], tiny_config("kimi-k2-thinking"), seed=2)
        write_synthetic_checkpoint(bases["k2.5"], tiny_config("kimi-k2.5"), seed=3)
        (work / "typed").write_text("Hi\n")
        sys.stdin = (work / "typed").open()
        for command in SIX:  # imports what commands import when they run
            sys.stdin.seek(0)
            assert run(command, bases["fp8"], work / command) == 0
        first, count, jobs = (numbers + [0, 300, 1][len(numbers) :]) if drawing else (0, len(KINDS), 1)
        dealt = [range(first + job, first + count, jobs) for job in range(jobs)]
        with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
            found = list(pool.map(partial(run_all, bases, work, drawing=drawing, match=match), dealt))
        if not any(one.seconds for one in found):
            raise SystemExit(f"no kind of malformed checkpoint is called {match!r}")
        report(found, drawing)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
