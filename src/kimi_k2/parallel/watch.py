"""Whether the other ranks still live: a rank that waits for a dead one ends, and says which it was.

A sum over ranks cannot tell a slow peer from a dead one: the kernel spins on its GPU, NCCL waits for ten minutes, and a
shorter limit would end ranks that rightly wait for one that loads or compiles. So each rank counts up a number of its
own in the store where the ranks met, from a thread, and looks at the others' numbers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kimi_k2.errors import KimiK2Error

# A thread of Python can be kept waiting by a long call that holds the interpreter, hardly for so long.
PATIENCE = 30.0
INTERVAL = 2.0
# What the main thread has to leave by itself, if it is not stuck.
GRACE = 5.0


class RankLostError(KimiK2Error):
    """Another rank ended, or does not answer any more."""


class Watch:
    """A thread that ends this process when a rank is lost, unless it has left before.

    Args:
        rank: of this process.
        ranks: how many there are; they met by MASTER_ADDR and MASTER_PORT.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.others = rank, [other for other in range(ranks) if other != rank]
        # A connection of its own: an operation on the group's may wait for another rank.
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PATIENCE))
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
                        self._end(f"rank {other} is lost: no sign of it for {PATIENCE:g} s")
            except RuntimeError:  # subclasses of it: the store is gone
                self._end("rank 0 is lost, or what started it: the ranks' store does not answer")
                return
            self._stopped.wait(INTERVAL)

    @staticmethod
    def _key(rank: int) -> str:
        return f"kimi_k2/lives/{rank}"

    def _end(self, why: str) -> None:
        if self._leaving.is_set():
            return
        self._lost = why
        self._found.set()
        if not self._stopped.wait(GRACE):
            sys.stderr.write(f"error: rank {self.rank}: {why}\n")
            sys.stderr.flush()
            os._exit(1)  # the main thread waits where no exception reaches it
