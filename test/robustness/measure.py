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
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import kinds_of_shards
import kinds_of_text
import kinds_of_tokenizers
import torch
from damage import Kind, private_copy
from drawn import mutate
from mechanisms import MECHANISMS, drawn
from run_commands import COMMANDS, SIX, Ending, run

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

SECONDS, MEMORY, DRAWN = 2.0, 400e6, 100
TIMEOUT = 60
# Of a drawn mechanism, beyond the same command on the sound checkpoint.
MORE_SECONDS, MORE_MEMORY = 5.0, 500e6


class Run(NamedTuple):
    """One command on one checkpoint."""

    name: str
    ending: Ending
    seconds: float
    peak: int
    fault: str | None


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


def all_runs(bases: dict[str, Path], work: Path, match: str) -> Iterator[Run]:
    """Each kind, then the drawn ones."""

    def runs(name: str, base: str, damage: Callable[[Path], object], kind: Kind | None) -> Iterator[Run]:
        checkpoint = private_copy(bases[base], work / "checkpoint")
        damage(checkpoint)
        for command in COMMANDS:
            ending, seconds, peak = in_child(command, checkpoint, work)
            fault = ending.fault(kind) if kind else ending.unclean() if ending.status else None
            yield Run(name, ending, seconds, peak, fault)
        shutil.rmtree(checkpoint)

    for kind in (*kinds_of_text.kinds(), *kinds_of_shards.kinds(), *kinds_of_tokenizers.kinds()):
        if match in kind.name:
            yield from runs(kind.name, kind.base, kind.damage, kind)
    for seed in range(DRAWN):
        if match not in f"drawn {seed}":
            continue
        base, done = sorted(bases)[seed % len(bases)], list[str]()

        def damage(directory: Path, seed: int = seed, done: list[str] = done) -> None:
            done.append(mutate(directory, seed))

        for one in runs("", base, damage, None):
            yield one._replace(name=f"drawn {seed}, {base}, {done[0]}")


class Drawn(NamedTuple):
    """What many seeds gave; the worst are pairs of a figure beyond the sound checkpoint's and what took it."""

    faults: list[str]
    accepted: list[str]
    refused: int
    slowest: list[tuple[float, str]]
    largest: list[tuple[float, str]]


def by_mechanism(bases: dict[str, Path], top: Path, seeds: range) -> Drawn:
    """Each seed's fault with six commands, beside the sound checkpoint."""
    work = Path(tempfile.mkdtemp(dir=top))
    shutil.copy(top / "typed", work)
    sound: dict[tuple[str, str], tuple[Ending, float, int]] = {}
    for base, directory in bases.items():
        for command in SIX:
            checkpoint = private_copy(directory, work / "checkpoint")  # errors and tables name the same path
            sound[base, command] = in_child(command, checkpoint, work)
            assert sound[base, command][0].status == 0, sound[base, command][0]
            shutil.rmtree(checkpoint)
    found = Drawn([], [], 0, [], [])
    for seed in seeds:
        base = sorted(bases)[seed // len(MECHANISMS) % len(bases)]
        fault = drawn(seed, bases[base])
        for command in SIX:
            checkpoint = private_copy(bases[base], work / "checkpoint")
            fault.damage(checkpoint)
            meanwhile = None if fault.meanwhile is None else partial(_later, seed, fault.meanwhile, checkpoint)
            ending, seconds, peak = in_child(command, checkpoint, work, meanwhile)
            subprocess.run(["rm", "-rf", checkpoint], check=True)
            good, usual, held = sound[base, command]
            name = f"seed {seed}, {base}, {fault.mechanism}: {fault.name}: {command}"
            found.slowest.append((seconds - usual, name))
            found.largest.append((peak - held, name))
            found = found._replace(refused=found.refused + (ending.status != 0))
            what = ending.unclean() if ending.status else None
            refused_by = None if command[0] in fault.either else fault.refused
            if ending.status == 0 and refused_by is not None:
                if command[0] in refused_by:
                    what = f"accepted: {ending.said[-300:]!r}"
                elif _shown(ending) != _shown(good):
                    what = f"says something else: {ending.said[-300:]!r}"
            elif ending.status and refused_by is not None and command[0] not in refused_by:
                what = f"refused: {ending.said[-300:]!r}"
            elif ending.status == 0 and refused_by is None and _shown(ending) != _shown(good):
                found.accepted.append(name)
            if seconds - usual > MORE_SECONDS or peak - held > MORE_MEMORY:
                what = f"{seconds:.1f} s, {peak / 1e6:.0f} MB ({usual:.1f} s, {held / 1e6:.0f} MB sound); {what}"
            if what:
                found.faults.append(f"{name}: {what}")
                print(found.faults[-1], flush=True)
    return found


def all_mechanisms(bases: dict[str, Path], work: Path, first: int, count: int, jobs: int) -> None:
    """Seeds dealt out to processes, and what they found."""
    dealt = [range(first + job, first + count, jobs) for job in range(jobs)]
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        found = list(pool.map(by_mechanism, [bases] * jobs, [work] * jobs, dealt))
    print("\n".join(["accepted, with another result:", *sorted(name for one in found for name in one.accepted)]))
    for most in ([one.slowest for one in found], [one.largest for one in found]):
        for figure, name in sorted((pair for pairs in most for pair in pairs), reverse=True)[:5]:
            print(f"{figure / 1e6:.0f} MB more: {name}" if figure > 1e4 else f"{figure:.2f} s more: {name}")
    print(
        f"{count} checkpoints, {count * len(SIX)} runs, {sum(one.refused for one in found)} refused,"
        f" {sum(len(one.faults) for one in found)} faults"
    )


def _later(seed: int, damage: Callable[[Path], object], checkpoint: Path) -> None:
    time.sleep(random.Random(-seed).uniform(0, 0.3))
    damage(checkpoint)


def _shown(ending: Ending) -> str:
    """What it says, without times."""
    return re.sub(r"TTFT.*", "", ending.said)


def main() -> None:
    """Run and report."""
    torch.set_num_threads(1)
    mechanisms = "--mechanisms" in sys.argv
    numbers = [int(word) for word in sys.argv[2:5]] if mechanisms else []
    match = sys.argv[1] if len(sys.argv) > 1 else ""
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
        if mechanisms:
            all_mechanisms(bases, work, *(numbers + [0, 300, 1][len(numbers) :]))
            return
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        start, found = time.time(), []
        for one in all_runs(bases, work, match):
            found.append(one)
            over = one.seconds > SECONDS or one.peak > MEMORY
            if one.fault or over:
                print(f"{one.name}: {one.ending.command}: {one.seconds:.2f} s, {one.peak / 1e6:.0f} MB: {one.fault}")
            elif one.name.startswith("drawn") and one.ending.status == 0:
                print(f"accepted by {one.ending.command}: {one.name}")
        if not found:
            raise SystemExit(f"no kind of malformed checkpoint is called {match!r}")
        slowest, largest = max(found, key=lambda one: one.seconds), max(found, key=lambda one: one.peak)
        print(
            f"{len({one.name for one in found})} checkpoints, {len(found)} runs in {time.time() - start:.0f} s,"
            f" {sum(one.ending.status != 0 for one in found)} refused, {sum(bool(one.fault) for one in found)} faults;"
            f" slowest {slowest.seconds:.2f} s ({slowest.name}: {slowest.ending.command});"
            f" largest {largest.peak / 1e6:.0f} MB ({largest.name}: {largest.ending.command}), {own / 1e6:.0f} at start"
        )
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
