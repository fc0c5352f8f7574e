"""Processes of a test that run at the same time, such as the ranks of a group."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from subprocess import PIPE

from forked import python

KIMI = [*python(), "-c", "from kimi_k2.cli import main; main()"]
TORCHRUN = [*python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]


def run_together(commands: Iterable[Sequence[object]], timeout: float = 120.0) -> None:
    """Start all, wait up to `timeout` seconds for each, and want status 0 of each; none outlives the call."""
    processes = [subprocess.Popen([str(word) for word in command]) for command in commands]
    try:
        assert [process.wait(timeout=timeout) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command's end, within ten minutes; torchrun then ends its ranks, which would outlive it if it were killed."""
    words, environment = [str(word) for word in command], {**os.environ, "OMP_NUM_THREADS": "1"}
    if path := environment.get("PYTHONPATH"):  # may be relative to where the tests were started
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    with subprocess.Popen(words, stdout=PIPE, stderr=PIPE, text=True, env=environment, cwd=cwd) as process:
        try:
            out, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate(timeout=60)
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, errors)
