"""Malformed checkpoints: one error that names file, tensor or field, or rightly accepted; never a traceback.

`KIMI_K2_SLOW=1` runs every kind with every command; otherwise some kinds with one command. Seven of each mechanism
are drawn too, or as many as `KIMI_K2_DRAWS` says. No command takes long over it, or much memory.
"""

from __future__ import annotations

import io
import os
import re
import resource
import time
from pathlib import Path

import kinds_of_shards
import kinds_of_text
import kinds_of_tokenizers
import pytest
from damage import Kind, private_copy
from mechanisms import MECHANISMS, drawn
from run_commands import COMMANDS, SIX, Ending, run

SEEDS = len(MECHANISMS) * int(os.environ.get("KIMI_K2_DRAWS", "7"))
ALL = bool(os.environ.get("KIMI_K2_SLOW"))
KINDS = [*kinds_of_text.kinds(), *kinds_of_shards.kinds(), *kinds_of_tokenizers.kinds()]
# Of CPU, and of memory beyond the most that this process has held.
MOST_SECONDS, MOST_BYTES = 5.0, 500e6
# Where time counts, every fourth of those that one command alone reads and every sixteenth of the others.
CHOSEN = [kind for number, kind in enumerate(KINDS) if ALL or number % (16 if kind.refused == "icg" else 4) == 0]


def endings(directory: Path, out: Path, commands: list[str], capsys: pytest.CaptureFixture[str]) -> list[Ending]:
    found = []
    for command in commands:
        began, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        status = run(command, directory, out / command)
        seconds, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert seconds < MOST_SECONDS and (peak - held) * 1024 < MOST_BYTES, (command, seconds, peak - held)
        shown = capsys.readouterr()
        found.append(Ending(command, status, shown.out + shown.err if status else ""))
    return found


def test_there_are_enough_kinds_with_names_of_their_own() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 124


@pytest.mark.parametrize("kind", CHOSEN, ids=lambda kind: re.sub(r"[^\w .=:-]", "_", kind.name))
def test_a_kind(checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Kind) -> None:
    directory = private_copy(checkpoints[kind.base], tmp_path / "checkpoint")
    kind.damage(directory)
    # The command that reads most of it.
    commands = list(COMMANDS) if ALL else ["convert" if kind.refused == "cg" else "generate"]
    faults = [ending.fault(kind) for ending in endings(directory, tmp_path, commands, capsys)]
    assert not any(faults), "\n".join(fault for fault in faults if fault)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_mechanism(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """What must be refused is, by `generate`, which reads most."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))  # of `chat`
    base = checkpoints[("fp8", "thinking", "bf16", "k2.5")[seed // len(MECHANISMS) % 4]]
    fault = drawn(seed, base)
    directory = private_copy(base, tmp_path / "checkpoint")
    fault.damage(directory)
    for ending in endings(directory, tmp_path, list(SIX) if ALL else ["generate"], capsys):
        assert not ending.fault(fault), (fault, ending.fault(fault))
