"""CUDA graphs of our work in vLLM's process: of prompts and of decode steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.utils.torch_utils import weak_ref_tensor

from kimi_k2.errors import KernelError

# What a capture may end with: no memory left, or a launch that a graph cannot hold.
CANNOT = (RuntimeError, KernelError)

Work = Callable[[], tuple[Tensor, ...]]
Recorded = tuple[Callable[[], Any], tuple[Tensor, ...]]


class Recorder(Protocol):
    """Makes a function's work repeatable."""

    def __call__(self, work: Work) -> Recorded:
        """What repeats it, and what the function returned, which a repetition fills anew."""
        ...

    def let_go(self, tensor: Tensor) -> Tensor:
        """The same tensor, whose memory works that are recorded later may take."""
        ...


class GraphRecorder:
    """By CUDA graphs. All share memory, so that the order in which they were recorded is that of replays too."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, work: Work) -> Recorded:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            # Other threads of vLLM's may ask the GPU meanwhile.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                made = work()
            except Exception:
                with suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay, made

    def let_go(self, tensor: Tensor) -> Tensor:
        """See `Recorder`."""
        weak: Tensor = weak_ref_tensor(tensor)
        return weak

    def held(self) -> int:
        """Bytes that the graphs' memory takes of PyTorch's allocator."""
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self.pool))
