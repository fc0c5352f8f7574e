"""A rank whose peer is killed or never comes ends with its number, whether an exception reaches it or nothing does."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from kimi_k2.cli.errors import errors_handled
from kimi_k2.parallel import ranks


def set_up(rank: int, size: int, port: int, said: Path) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 (pytest's own is in memory)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    ranks.PATIENCE, ranks.INTERVAL, ranks.GRACE, ranks.MEETING = 3.0, 0.3, 0.5, 2.0


def join(rank: int, size: int, port: int, said: Path) -> None:
    """Rank 1 of two dies when both have met and no group is made yet."""
    set_up(rank, size, port, said)
    with errors_handled():
        if (rank, size) == (1, 2):
            ranks.meet(rank, size)
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.join_ranks("cpu")


def run_rank(rank: int, port: int, dies: int, how: str, said: Path) -> None:
    """Rank `dies` is killed once both have met; the other is at a sum, or where no exception comes."""
    set_up(rank, 2, port, said)
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


def run_all(calls: list[tuple[Callable[..., None], tuple[object, ...]]]) -> list[int | None]:
    """Exit codes of calls in processes of their own, the port put in place of None."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = get_context("fork")
    processes = [
        fork.Process(target=call, args=[port if argument is None else argument for argument in arguments])
        for call, arguments in calls
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]


@pytest.mark.parametrize(("dies", "how"), [(1, "sum"), (1, "stuck"), (0, "stuck"), (0, "well")])
def test_a_killed_rank_is_named(tmp_path: Path, dies: int, how: str) -> None:
    said = [tmp_path / str(rank) for rank in range(2)]
    codes = run_all([(run_rank, (rank, None, dies, how, said[rank])) for rank in range(2)])
    if how == "well":
        assert codes == [0, 0], [path.read_text() for path in said]
        return
    lives = 1 - dies
    assert codes[dies] == -signal.SIGKILL
    assert codes[lives] == 1, said[lives].read_text()
    assert f"error: rank {lives} on {socket.gethostname()}: rank {dies} is lost" in said[lives].read_text()


@pytest.mark.parametrize(
    ("come", "size", "why"),
    [
        ((0, 2), 4, "rank 1 and 3 of 4 did not come to 127.0.0.1:"),
        ((1,), 3, "no answer from rank 0, or what started it, at 127.0.0.1:"),
        ((0, 1), 2, "rank 1 is lost: no sign of it from"),
    ],
)
def test_ranks_that_never_came_are_named(tmp_path: Path, come: tuple[int, ...], size: int, why: str) -> None:
    said = {rank: tmp_path / str(rank) for rank in come}
    codes = run_all([(join, (rank, size, None, said[rank])) for rank in come])
    for rank, code in zip(come, codes, strict=True):
        if (rank, size) != (1, 2):
            assert code == 1, said[rank].read_text()
            assert f"error: rank {rank} on {socket.gethostname()}: {why}" in said[rank].read_text()
