"""The processes that `torchrun` starts, each a rank with its own file of a conversion."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import gethostname

import torch
import torch.distributed as dist

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import Generator
from kimi_k2.errors import ConfigError
from kimi_k2.ops.collective import gather_last
from kimi_k2.parallel.all_reduce import AllReduce
from kimi_k2.parallel.load import load_rank
from kimi_k2.parallel.watch import RankLostError, Watch, meet
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import load_manifest, made_layout
from kimi_k2.sharding.source import check_source


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
        self.generator.close()
        if kind is None:
            leave_ranks()
        elif _WATCHES:
            lost = _WATCHES[-1].lost() if isinstance(error, RuntimeError) and _is_of_peers(error) else None
            _WATCHES.pop().stop()
            if lost is not None:
                raise RankLostError(f"rank {self.number} on {gethostname()}: {lost}") from error


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
    place = torch.device(device, local) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world_size() > 1 and not dist.is_initialized():
        store, hosts = meet(rank, world_size())
        _WATCHES.append(Watch(rank, hosts))  # before the group, in whose making ranks wait for each other, too
        backend, device_id = ("nccl", place) if place.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size(), device_id=device_id)
    return rank, place


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
    number, place = join_ranks(device)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # the other processes of a host see the same files
        check_source(directory, checkpoint)
    try:
        model = load_rank(directory, config, layout, number, dtype=dtype, device=place)
    except torch.OutOfMemoryError as error:
        error.add_note(f"a rank's weights have {max(load_manifest(directory)['files'].values()) / 1e9:.1f} GB")
        raise
    if started == 1:
        return Rank(number, Generator(model), layout)
    return Rank(number, Generator(model, reduce=AllReduce(None), gather=partial(gather_last, group=None)), layout)
