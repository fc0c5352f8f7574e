"""Ranks meet within a minute, and one that waits for a dead one ends: each says which it was.

A sum over ranks cannot tell a slow peer from a dead one: the kernel spins on its GPU, NCCL waits for ten minutes, and a
shorter limit would end ranks that rightly wait for one that loads or compiles. So each rank counts up a number of its
own in the store where the ranks met, from a thread, and looks at the others' numbers.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from kimi_k2.errors import KimiK2Error

# How long ranks wait for one that has not come: a start of Python with its imports.
MEETING = 60.0
# A thread of Python can be kept waiting by a long call that holds the interpreter, hardly for so long.
PATIENCE = 30.0
INTERVAL = 2.0
POLL = 0.3
# What the main thread has to leave by itself, if it is not stuck.
GRACE = 5.0


class RankLostError(KimiK2Error):
    """Another rank ended, or does not answer any more."""


def _connect(seconds: float, serve: bool = False) -> PrefixStore:
    """The store at MASTER_ADDR and MASTER_PORT; torchrun starts ranks anew beside an older attempt's keys."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=seconds)
    store = TCPStore(host, port, is_master=serve, timeout=limit, wait_for_workers=False, multi_tenant=True)
    return PrefixStore(f"kimi_k2/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def meet(rank: int, ranks: int) -> tuple[PrefixStore, list[str]]:
    """The store that all ranks have come to, and the host of each.

    Rank 0 serves it, or torchrun does. Nothing else of PyTorch's meeting says who is missing.

    Raises:
        RankLostError: some have not come within MEETING seconds of the first that stopped waiting.
    """
    here, place = socket.gethostname(), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _connect(MEETING, serve=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
        store.set(f"host/{rank}", here)
        end = time.monotonic() + MEETING
        while missing := [str(other) for other in range(ranks) if not store.check([f"host/{other}"])]:
            if time.monotonic() > end or store.check(["ended"]):
                store.set("ended", "")
                time.sleep(2 * POLL if rank == 0 else 0)  # until the others have seen it
                raise RankLostError(
                    f"rank {rank} on {here}: rank {' and '.join(missing)} of {ranks} did not come to {place} within"
                    f" {MEETING:g} s; start all ranks again"
                )
            time.sleep(POLL)
        hosts = [store.get(f"host/{other}").decode() for other in range(ranks)]
    except RuntimeError as error:  # subclasses of it: no store there, or not any more
        raise RankLostError(
            f"rank {rank} on {here}: no answer from rank 0, or what started it, at {place} within {MEETING:g} s"
        ) from error
    store.set_timeout(timedelta(minutes=10))  # as NCCL's own; from here on the watch ends what waits in vain
    return store, hosts


class Watch:
    """A thread that ends this process when a rank is lost, unless it has left before.

    Args:
        rank: of this process.
        hosts: of each rank; they have met.
    """

    def __init__(self, rank: int, hosts: list[str]) -> None:
        self.rank, self.hosts = rank, hosts
        self.others = [other for other in range(len(hosts)) if other != rank]
        # A connection of its own: an operation on the group's may wait for another rank.
        self._store = _connect(PATIENCE)
        self._found = threading.Event()
        self._leaving, self._stopped = threading.Event(), threading.Event()
        self._lost = ""
        self._thread = threading.Thread(target=self._run, name="kimi-k2-watch", daemon=True)
        self._thread.start()

    def lost(self) -> str | None:
        """Which rank is lost, once a failed sum makes one likely; None if all live after all."""
        self._found.wait(PATIENCE + 2 * INTERVAL)
        return self._lost or None

    def leave(self) -> None:
        """Others may end from now on; this rank still counts, as they may not have come so far."""
        self._leaving.set()

    def stop(self) -> None:
        """Count no more."""
        self._leaving.set()
        self._stopped.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        count = 0
        while not self._stopped.is_set():
            count += 1
            try:
                self._store.set(self._key(self.rank), str(count))
                for other in self.others:
                    key, before = self._key(other), seen.get(other)
                    now = self._store.get(key) if self._store.check([key]) else b""
                    if before is None or before[0] != now:
                        seen[other] = now, time.monotonic()
                    elif time.monotonic() - before[1] > PATIENCE:
                        self._end(f"rank {other} is lost: no sign of it from {self.hosts[other]} for {PATIENCE:g} s")
            except RuntimeError:  # subclasses of it: the store is gone
                why = "rank 0 is lost, or what started it: the ranks' store does not answer"
                self._end(f"{why} on {self.hosts[0]}")
                return
            self._stopped.wait(INTERVAL)

    @staticmethod
    def _key(rank: int) -> str:
        return f"lives/{rank}"

    def _end(self, why: str) -> None:
        if self._leaving.is_set():
            return
        self._lost = why
        self._found.set()
        if not self._stopped.wait(GRACE):
            sys.stderr.write(f"error: rank {self.rank} on {self.hosts[self.rank]}: {why}\n")
            sys.stderr.flush()
            os._exit(1)  # the main thread waits where no exception reaches it
