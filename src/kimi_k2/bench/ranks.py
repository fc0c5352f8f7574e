"""The sweep over several ranks: rank 0 runs it, the others generate what it generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from kimi_k2.bench.backend import Prompts, TorchBackend
from kimi_k2.bench.errors import RanksLostError
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.device import check_device
from kimi_k2.errors import KimiK2Error
from kimi_k2.model.cache import kv_cache_dtype
from kimi_k2.parallel.ranks import Rank, load_ranks


class RanksBackend(TorchBackend):
    """A conversion's ranks, one a process under torchrun; at the end of a `with` that went well rank 0 lets all go."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.generator, rank.layout.experts)
        self.part = rank
        self.details |= {"moe_tp": rank.layout.moe_tp, "moe_ep": rank.layout.moe_ep}

    @classmethod
    def load_ranks(
        cls,
        checkpoint: Path,
        ranks: Path,
        device: str,
        dtype: torch.dtype,
        kv_cache: str = "auto",
        batch_invariant: bool = False,
    ) -> RanksBackend:
        """This process's file.

        Args:
            checkpoint: that was converted, or a directory with its config.json.
            ranks: output of `kimi-k2 convert --target cuda`.
            device: cpu or cuda.
            dtype: of activations and float weights.
            kv_cache: dtype of the KV cache, see `kv_cache_dtype`.
            batch_invariant: the model's mode.

        Raises:
            DeviceError: cuda is asked for and there is none.
            ConfigError, CheckpointError: see `parallel.ranks.load_ranks`.
        """
        check_device(device)
        config = KimiK2Config.from_pretrained(checkpoint)
        rank = load_ranks(ranks, checkpoint, config, dtype, device)
        model = rank.generator.model
        model.kv_cache_dtype, model.batch_invariant = kv_cache_dtype(kv_cache, config), batch_invariant
        return cls(rank)

    def generate(self, prompts: Prompts, new_tokens: int) -> Iterator[None]:
        """On rank 0: see Backend; the others join in from `follow`. TTFT contains handing them the prompts.

        Raises:
            RanksLostError: a failure that the other ranks need not share.
        """
        self._share((prompts, new_tokens))
        return self._steps(prompts, new_tokens)

    def follow(self) -> None:
        """On the other ranks: generate what rank 0 does, until it stops.

        Raises:
            RanksLostError: a failure that the other ranks need not share.
        """
        while (asked := self._share(None)) is not None:
            try:
                for _ in self._steps(*asked):
                    pass
            except RanksLostError:
                raise
            except KimiK2Error:
                # By the arguments alone: rank 0 has it, too, records it and goes on with the next cell.
                continue

    def __enter__(self) -> RanksBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.generator.close()  # first, as the others may be lost
        if kind is None and self.part.number == 0:
            self._share(None)
        cause = error.__cause__ if isinstance(error, RanksLostError) else error
        self.part.__exit__(kind, cause)

    def _steps(self, prompts: Prompts, new_tokens: int) -> Iterator[None]:
        try:
            yield from super().generate(prompts, new_tokens)
        except (RuntimeError, MemoryError) as error:
            raise RanksLostError(
                f"RanksLostError: rank {self.part.number}: {error}; start the sweep again, finished cells are kept"
            ) from error

    def _share(self, asked: tuple[Prompts, int] | None) -> tuple[Prompts, int] | None:
        if not dist.is_initialized():
            return asked
        box = [asked]
        dist.broadcast_object_list(box, src=0, device=self.model.lm_head.weight.device)
        return box[0]
