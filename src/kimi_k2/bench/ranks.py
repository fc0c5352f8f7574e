"""The sweep over several ranks: rank 0 runs it, the others generate what it generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from kimi_k2.bench.backend import Prompts, TorchBackend, check_device
from kimi_k2.config import KimiK2Config
from kimi_k2.cuda.generator import Generator
from kimi_k2.errors import KimiK2Error
from kimi_k2.parallel.ranks import leave_ranks, load_generator


class RanksBackend(TorchBackend):
    """A conversion's ranks, one a process under torchrun.

    Args:
        generator: of this process's part.
        rank: this process's.
    """

    def __init__(self, generator: Generator, rank: int) -> None:
        super().__init__(generator, "stored")
        self.rank = rank
        if dist.is_initialized():
            self.details["ranks"] = dist.get_world_size()

    @classmethod
    def load_ranks(cls, checkpoint: Path, ranks: Path, device: str, dtype: torch.dtype) -> RanksBackend:
        """This process's file.

        Args:
            checkpoint: directory with config.json.
            ranks: output of `kimi-k2 convert --target cuda`.
            device: cpu or cuda.
            dtype: of activations and float weights.

        Raises:
            BackendUnavailableError: cuda is asked for and there is none.
            ConfigError, CheckpointError: see `parallel.ranks.load_generator`.
        """
        check_device(device)
        rank, generator = load_generator(ranks, KimiK2Config.from_pretrained(checkpoint), dtype, device)
        return cls(generator, rank)

    def generate(self, prompts: Prompts, new_tokens: int) -> Iterator[None]:
        """On rank 0: see Backend; the others join in from `follow`."""
        self._share((prompts, new_tokens))
        return super().generate(prompts, new_tokens)

    def follow(self) -> None:
        """On the other ranks: generate what rank 0 does, until it stops."""
        while (asked := self._share(None)) is not None:
            try:
                for _ in super().generate(*asked):
                    pass
            except (KimiK2Error, RuntimeError, MemoryError):
                # Ranks fail alike: rank 0 records it and goes on with the next cell.
                continue

    def stop(self) -> None:
        """The end of the sweep: rank 0 lets the others go, and all part."""
        if self.rank == 0:
            self._share(None)
        leave_ranks()

    def _share(self, asked: tuple[Prompts, int] | None) -> tuple[Prompts, int] | None:
        if not dist.is_initialized():
            return asked
        box = [asked]
        dist.broadcast_object_list(box, src=0, device=self.model.lm_head.weight.device)
        return box[0]
