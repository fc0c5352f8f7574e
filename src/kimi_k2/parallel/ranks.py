"""The processes that `torchrun` starts, each a rank with its own file of a conversion.

They meet within a minute, and one that waits for a dead one ends; each says which it was. A sum over ranks cannot tell
a slow peer from a dead one: the kernel spins on its GPU, NCCL waits for ten minutes, and a shorter limit would end
ranks that rightly wait for one that loads or compiles. So each rank counts up a number of its own in the store where
the ranks met, from a thread, and looks at the others' numbers.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from socket import gethostname

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import Generator
from kimi_k2.errors import BusyError, ConfigError, KimiK2Error
from kimi_k2.ops.collective import gather_last
from kimi_k2.parallel.apply import AllReduce, load_rank
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import check_source, load_manifest, made_layout
from kimi_k2.terminal import say

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
    here, address = socket.gethostname(), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _connect(MEETING, serve=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
        store.set(f"host/{rank}", here)
        end = time.monotonic() + MEETING
        while missing := [str(other) for other in range(ranks) if not store.check([f"host/{other}"])]:
            if time.monotonic() > end or store.check(["ended"]):
                store.set("ended", "")
                time.sleep(2 * POLL if rank == 0 else 0)  # until the others have seen it
                raise RankLostError(
                    f"rank {rank} on {here}: rank {' and '.join(missing)} of {ranks} did not come to {address} within"
                    f" {MEETING:g} s; start all ranks again"
                )
            time.sleep(POLL)
        hosts = [store.get(f"host/{other}").decode() for other in range(ranks)]
    except RuntimeError as error:  # subclasses of it: no store there, or not any more
        raise RankLostError(
            f"rank {rank} on {here}: no answer from rank 0, or what started it, at {address} within {MEETING:g} s"
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
            say(f"error: rank {self.rank} on {self.hosts[self.rank]}: {why}", err=True)
            os._exit(1)  # the main thread waits where no exception reaches it


@dataclass(frozen=True)
class Rank:
    """This process's part of a model: its number, what generates with the others', and how the model is divided.

    At the end of a `with` that went well the ranks part; after an error the others may be at another sum, where they
    cannot hear of it: torchrun ends them, or their watch does.
    """

    number: int
    generator: Generator
    layout: Layout

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object) -> None:
        with suppress(BusyError) if kind is not None else nullcontext():  # the error's frames may hold an open stream
            self.generator.close()
        if kind is None:
            leave_ranks()
        elif _WATCHES:
            cause = error.__cause__ if isinstance(error, KimiK2Error) else error
            lost = _WATCHES[-1].lost() if isinstance(cause, RuntimeError) and _is_of_peers(cause) else None
            _WATCHES.pop().stop()
            if lost is not None:
                raise RankLostError(f"rank {self.number} on {gethostname()}: {lost}") from cause


# Of the ranks that this process has joined: one at most.
_WATCHES: list[Watch] = []


def _is_of_peers(error: RuntimeError) -> bool:
    """Whether it is how a sum with a rank that is gone ends: gloo has no type for it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "by peer" in str(error)


def world_size() -> int:
    """Processes that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank_number() -> int:
    """This process's, of those that torchrun has started; 0 without it."""
    return int(os.environ.get("RANK", 0))


def join_ranks(device: str) -> tuple[int, torch.device]:
    """This process's rank and device, after it has met the others: over NCCL for `cuda`, gloo for `cpu`.

    Raises:
        ConfigError: another device, or no GPU for this process.
        RankLostError: others have not come within a minute.
    """
    rank, local = rank_number(), int(os.environ.get("LOCAL_RANK", 0))
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"expected cpu or cuda, each rank then takes its own, got {device!r}", field="device")
    if device == "cuda" and local >= torch.cuda.device_count():
        raise ConfigError(f"process {local} finds {torch.cuda.device_count()} GPUs", field="device")
    own_device = torch.device(device, local) if device == "cuda" else torch.device(device)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    if world_size() > 1 and not dist.is_initialized():
        store, hosts = meet(rank, world_size())
        _WATCHES.append(Watch(rank, hosts))  # before the group, in whose making ranks wait for each other, too
        backend, device_id = ("nccl", own_device) if own_device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size(), device_id=device_id)
    return rank, own_device


def leave_ranks() -> None:
    """Wait for the others and part from them.

    No graph may be left that holds launches of NCCL, which would wait for its end: see DecodeStep.close.
    """
    if not dist.is_initialized():
        return
    for watch in _WATCHES:
        watch.leave()
    dist.barrier()
    while _WATCHES:
        _WATCHES.pop().stop()
    dist.destroy_process_group()


def load_ranks(directory: Path, checkpoint: Path, config: KimiK2Config, dtype: torch.dtype, device: str) -> Rank:
    """The part of the model whose file in `directory` is this process's.

    Args:
        directory: output of `kimi-k2 convert --target cuda`.
        checkpoint: that was converted; a warning says where it has no weights to compare with.
        config: of `checkpoint`.
        dtype: of activations and float weights.
        device: `cuda` or `cpu`.

    Raises:
        ConfigError: converted from another model or other weights, for another target or for another number of
            processes; a device that is not there.
        CheckpointError: (subclasses) the manifest or the rank's file is missing or damaged.
        RankLostError: see `join_ranks`.
    """
    layout = made_layout(directory)
    started = world_size()
    if started != layout.ranks:
        raise ConfigError(f"{layout.ranks} ranks in {directory}, but {started} processes: torchrun --nproc-per-node")
    number, own_device = join_ranks(device)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # the other processes of a host see the same files
        check_source(directory, checkpoint)
    try:
        model = load_rank(directory, config, layout, number, dtype=dtype, device=own_device)
    except torch.OutOfMemoryError as error:
        error.add_note(f"a rank's weights have {max(load_manifest(directory)['files'].values()) / 1e9:.1f} GB")
        raise
    if started == 1:
        return Rank(number, Generator(model), layout)
    return Rank(number, Generator(model, reduce=AllReduce(None), gather=partial(gather_last, group=None)), layout)
