"""Processes of a test that run at the same time, such as the ranks of a group."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence

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
