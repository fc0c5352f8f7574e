"""A rank whose peer is killed ends with the peer's number, whether an exception reaches it or nothing does."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from kimi_k2.cli.errors import errors_handled
from kimi_k2.parallel import ranks, watch


def run_rank(rank: int, port: int, dies: int, how: str, said: Path) -> None:
    """Rank `dies` is killed once both have met; the other is at a sum, or where no exception comes."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 (pytest's own is in memory)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    watch.PATIENCE, watch.INTERVAL, watch.GRACE = 3.0, 0.3, 0.5
    ranks.join_ranks("cpu")
    generator = SimpleNamespace(close=lambda: None)
    with errors_handled(), ranks.Rank(rank, generator, None):  # type: ignore[arg-type]
        dist.barrier()
        if rank == dies and how != "well":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sum":
            dist.barrier()
        elif how == "stuck":
            time.sleep(100)
        elif rank == 1:
            time.sleep(5)  # longer than the other's patience, and alive


@pytest.mark.parametrize(("dies", "how"), [(1, "sum"), (1, "stuck"), (0, "stuck"), (0, "well")])
def test_a_killed_rank_is_named(tmp_path: Path, dies: int, how: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = get_context("fork")
    said = [tmp_path / str(rank) for rank in range(2)]
    processes = [fork.Process(target=run_rank, args=(rank, port, dies, how, said[rank])) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    codes = [process.exitcode for process in processes]
    if how == "well":
        assert codes == [0, 0], [path.read_text() for path in said]
        return
    lives = 1 - dies
    assert codes[dies] == -signal.SIGKILL
    assert codes[lives] == 1, said[lives].read_text()
    assert f"error: rank {lives}: rank {dies} is lost" in said[lives].read_text()
