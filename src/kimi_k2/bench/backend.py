"""What the sweep times: a model that `KimiK2.open` loaded, on any backend, alone or over ranks.

It yields once for each decode step, when the step's tokens have arrived on the host. The sweep holds the watch, so that
all backends are timed alike. Over ranks the first runs the sweep, and the others generate what it generates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kimi_k2.bench.errors import RanksLostError, SweepError
from kimi_k2.engine.decode_step import capturable
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import KimiK2Error
from kimi_k2.neuron.application import NeuronApplication

if TYPE_CHECKING:
    from kimi_k2.api import KimiK2

Prompts = Sequence[Sequence[int]]


class Backend:
    """A loaded model that generates to a fixed length.

    Args:
        session: the model.
        name: cpu, cuda or neuron.
        details: for the result's environment, beside dtypes or compiler arguments.

    Attributes:
        vocab_size: prompts are drawn below it.
    """

    def __init__(self, session: KimiK2, name: str, details: dict[str, Any]) -> None:
        self.session, self.name, self.vocab_size = session, name, session.config.vocab_size
        generator = session.generator
        if isinstance(generator, NeuronApplication):
            arguments = {wrapper.tag: wrapper.compiler_args for wrapper in generator.app.models}
            self.details = {"preset": generator.name, "compiler_args": arguments, **details}
        else:
            model = generator.model
            dtypes = {"dtype": model.dtype, "kv_cache": model.kv_cache_dtype or model.dtype}
            self.details = {
                **{field: str(dtype).removeprefix("torch.") for field, dtype in dtypes.items()},
                "batch_invariant": model.batch_invariant,
                "graph": capturable(model, 1),  # decode steps of one sequence are replayed
                **details,
            }

    def generate(self, prompts: Prompts, new_tokens: int) -> Iterator[None]:
        """Exactly `new_tokens` steps for prompts of one length, greedy, end tokens ignored; yields after each step.

        TTFT contains handing the prompts to the other ranks, which join in from `follow`.

        Raises:
            SweepError: the graphs were compiled for another batch.
            RanksLostError: a failure that the other ranks need not share.
        """
        _share((prompts, new_tokens))
        return self._steps(prompts, new_tokens)

    def follow(self) -> None:
        """On the other ranks: generate what rank 0 does, until it ends.

        Raises:
            RanksLostError: a failure that the other ranks need not share.
        """
        while (asked := _share(None)) is not None:
            try:
                for _ in self._steps(*asked):
                    pass
            except RanksLostError:
                raise
            except KimiK2Error:
                # By the arguments alone: rank 0 has it, too, records it and goes on with the next cell.
                continue

    def end(self) -> None:
        """On rank 0: let the others go."""
        _share(None)

    def reset_peak_memory(self) -> None:
        """GPU: torch's counter. CPU: the kernel's high-water mark, where this process may reset it."""
        if self.name == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak_memory(self) -> tuple[int | None, str]:
        """Bytes since the last reset and what they are of; None on Trainium, whose runtime tells no peak."""
        if self.name == "cuda":
            return torch.cuda.max_memory_allocated(), "allocated by torch on the GPU"
        if self.name == "cpu":
            # ru_maxrss would remember the parent's; without Linux's /proc nothing is known.
            with suppress(OSError):
                status = Path("/proc/self/status").read_text(encoding="ascii")
                return int(status.partition("VmHWM:")[2].split()[0]) * 1024, "resident memory of the process"
        return None, "unknown"

    def _steps(self, prompts: Prompts, new_tokens: int) -> Iterator[None]:
        generator = self.session.generator
        if isinstance(generator, NeuronApplication) and len(prompts) != generator.batch_size:
            raise SweepError(f"{generator.name} was compiled for a batch of {generator.batch_size}")
        try:
            for _ in generator.stream(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)):
                yield
        except (RuntimeError, MemoryError) as error:
            if not dist.is_initialized():
                raise
            raise RanksLostError(
                f"RanksLostError: rank {self.session.rank}: {error}; start the sweep again, finished cells are kept"
            ) from error


def _share(asked: tuple[Prompts, int] | None) -> tuple[Prompts, int] | None:
    """What rank 0 asks of all ranks; None lets them go."""
    if not dist.is_initialized():
        return asked
    box = [asked]
    dist.broadcast_object_list(box, src=0)
    return box[0]
