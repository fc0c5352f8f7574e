"""For `worker_extension_cls` of vLLM: of two ranks, the second cannot run a decode step while graphs are recorded.

KIMI_K2_TEST_REFUSED says which of its runs, from 1, the trial of the largest size; 0 none. On a CPU a stand-in records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from again import Again
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from kimi_k2.ops import collective
from kimi_k2.ops.mla import next_step
from kimi_k2.serving.vllm import decode_steps as module
from kimi_k2.serving.vllm.decode_steps import decode_steps, reason_against

REFUSED = int(os.environ["KIMI_K2_TEST_REFUSED"])
SIZES = [1, 2, 4]

runs = 0


def refusing(*given: Any) -> None:
    """As `next_step`, the first thing in a step."""
    global runs
    runs += 1
    if runs == REFUSED and get_tp_group().rank_in_group == 1:
        raise RuntimeError("refused by the second rank")
    next_step(*given)


class Exchanges:
    """In place of torch.distributed for our operations, as a library is for graphs.

    It connects ranks when they first exchange a size, which waits for all of them. While a graph is recorded that must
    not be, and what is exchanged waits for nobody; nor is it there.
    """

    def __init__(self) -> None:
        self.recording, self.connected = False, set[tuple[str, torch.Size]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, x: Tensor, **named: Any) -> None:
        """As torch.distributed's."""
        if self._made("all_reduce", x):
            dist.all_reduce(x, **named)

    def all_gather(self, parts: list[Tensor], x: Tensor, **named: Any) -> None:
        """As torch.distributed's."""
        if self._made("all_gather", x):
            dist.all_gather(parts, x, **named)

    def _made(self, name: str, x: Tensor) -> bool:
        if not self.recording:
            self.connected.add((name, x.shape))
        elif (name, x.shape) not in self.connected:
            raise RuntimeError(f"{name} of {list(x.shape)} would wait for the other rank")
        return not self.recording

    @contextmanager
    def captured(self) -> Iterator[None]:
        """A graph is recorded."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False


exchanges = Exchanges()


class Recorder(Again):
    """Says when it first repeats a step."""

    def __init__(self, weak: Any) -> None:
        super().__init__(exchanges.captured)
        self.repeated = False

    def __call__(self, work: Any) -> Any:
        """See `Again`."""
        found = super().__call__(work)

        def replay() -> None:
            if not self.repeated:
                print("a decode step is replayed", flush=True)
            self.repeated = True
            found.replay()

        return found._replace(replay=replay)

    def held(self) -> int:
        """As `GraphRecorder`."""
        return 0


class OnGpu:
    """vLLM's runner, which says that its device is a GPU, and of which sizes its own graphs are."""

    device = SimpleNamespace(type="cuda")
    compilation_config = SimpleNamespace(cudagraph_capture_sizes=SIZES)

    def __init__(self, runner: Any) -> None:
        vars(self)["runner"] = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.runner, name, value)


def on_gpu(runner: Any, *given: Any) -> Any:
    """As `decode_steps`; vLLM's own runs have connected nothing."""
    exchanges.connected.clear()
    return decode_steps(OnGpu(runner), *given)


vars(module)["next_step"] = refusing
if current_platform.is_cpu():
    vars(collective)["dist"] = exchanges
    vars(module)["GraphRecorder"] = Recorder
    vars(module)["reason_against"] = lambda runner, *given: reason_against(runner.runner, *given)
    vars(module)["decode_steps"] = on_gpu  # the worker imports it late
    vars(torch.cuda)["synchronize"] = lambda *_: None


class Extension:
    """Adds nothing to vLLM's worker, which imports this module for it."""
