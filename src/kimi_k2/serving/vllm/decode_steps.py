"""Decode steps of a batch that has not changed, prepared on the GPU.

vLLM's runner makes the inputs of every step anew on the host: about a hundred small tensor operations, which for few
requests take longer than the step. Where the same requests as in the step before each get one more token, the new
inputs follow from the old ones. They are then computed in the CUDA graph that holds the model and its head, and the
host only keeps vLLM's records. Sampling, structured output, stops and the scheduler are vLLM's as ever.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_k2.engine.batch import Batch
from kimi_k2.engine.graphs import GraphRecorder, Recorded, Recorder, on_all_ranks
from kimi_k2.ops.mla import next_step
from kimi_k2.serving.vllm.adapter import weak_ref_tensor
from kimi_k2.serving.vllm.ranks import connect, least_of_ranks
from kimi_k2.serving.vllm.runner import Runner
from kimi_k2.serving.vllm.support import against_decode_steps

logger = logging.getLogger("vllm.kimi_k2")

# Requests of a step up to which there are graphs: beyond, the GPU is busy while the host prepares.
MOST = 128

Forward = Callable[[], tuple[Tensor, ...]]


class DecodeSteps:
    """Those of one runner of vLLM's.

    Args:
        runner: it.
        model: ours in it.
        sizes: of batches to which others are padded, ascending.
    """

    def __init__(self, runner: Runner, model: Any, sizes: Sequence[int]) -> None:
        self.runner, self.model, self.sizes = runner, model, list(sizes)
        self._graphs: dict[int, Recorded] = {}

    def capture(self, record: Recorder) -> list[Recorded]:
        """Make a graph of each size, the largest first, whose memory the others then use. Every rank must call this."""
        paged, width = self.model.paged, self.runner.width
        with paged.plain.computing():
            connect(paged.exchanges(), paged.plain.lm_head.weight.device, [size * width for size in self.sizes])
        self.runner.empty()  # the kernels have been built and tuned by vLLM's own runs
        graphs = []
        for size in reversed(self.sizes):
            work = self._work(size)
            if size == self.sizes[-1]:
                with paged.alone():
                    work()
            recorded = record(work)
            graphs += [recorded._replace(made=()), *self._more(size, recorded, record)]
            self._graphs[size] = recorded._replace(made=tuple(map(record.let_go, recorded.made)))
        return graphs

    def _more(self, size: int, recorded: Recorded, record: Recorder) -> list[Recorded]:
        """Graphs of what follows a step of so many requests."""
        return []

    def size(self, count: int) -> int:
        """Of the batch to which `count` requests are padded."""
        return self.sizes[bisect_left(self.sizes, count)]

    def rows(self, scheduled: Any) -> list[int] | None:
        """Where in the batch each of the step's requests is; None where vLLM's runner must prepare the step."""
        return self.runner.rows(scheduled, self.sizes[-1])

    def run(self, scheduled: Any, rows: Sequence[int]) -> None:
        """As the runner's `execute_model`: the logits are left for its `sample_tokens`."""
        size, new = self.size(len(rows)), len(rows) * self.runner.width
        self._begin(self.runner.advance(scheduled, rows), size)
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
        hidden, logits, *aux = self._work(size)() if graph is None else graph.made
        self.runner.leave(scheduled, logits[:new], hidden[:new], [state[:new] for state in aux])
        self._follow(scheduled, size, aux)

    def _begin(self, computed: Tensor | None, size: int) -> None:
        """A step of so many requests is to be launched."""

    def _follow(self, scheduled: Any, size: int, aux: Sequence[Tensor]) -> None:
        """It was."""

    def _work(self, size: int) -> Forward:
        """A step of so many rows over the runner's buffers: hidden states [size, H], logits [size, vocab_size]."""
        held = self.runner.buffers(size)
        batch = Batch(size, size, held.seq_lens, held.slots, held.pages)

        def work() -> tuple[Tensor, ...]:
            next_step(held.seq_lens, held.ids, held.positions, held.slots, held.pages, held.page)
            return self.through(batch, held.ids, held.positions)

        return work

    def through(self, batch: Batch, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The model's hidden states of a batch, logits, and the states that a draft's head wants."""
        metadata = {layer.name: batch for layer in self.model.held}
        with self.runner.context(metadata, len(ids)):
            output = self.model(input_ids=ids, positions=positions)
        hidden, aux = output if isinstance(output, tuple) else (output, [])
        return hidden, self.model.compute_logits(hidden), *aux


def decode_steps(runner: Runner, model: Any, kind: type[DecodeSteps] = DecodeSteps) -> DecodeSteps | None:
    """Of a kind, as a deployment allows them; a line says so. Every rank must call this: all have them, or none."""
    reason = against_decode_steps(runner.it) or runner.against(model.graph_mode, model.held[0].cache.shape[1])
    if not least_of_ranks(reason is None):
        logger.info("kimi-k2: decode steps are prepared by vLLM: %s", reason or "on another rank")
        return None
    most = min(MOST // runner.width, runner.it.most)
    if not runner.on_gpu:
        return kind(runner, model, range(1, most + 1))
    sizes = sorted({size // runner.width for size in runner.it.captured or ()})  # these are in tokens
    sizes = [size for size in sizes if 0 < size <= most]
    if not sizes:
        return None
    began, steps, record = time.monotonic(), kind(runner, model, sizes), GraphRecorder(weak_ref_tensor)
    made, because = on_all_ranks(lambda: steps.capture(record), lambda here: bool(least_of_ranks(here)))
    if not made:
        logger.warning("kimi-k2: decode steps are prepared by vLLM: no graph of them: %s", because)
        return None
    torch.cuda.synchronize()
    logger.info(
        "kimi-k2: decode steps of up to %d requests follow each other on the GPU: %d sizes, %.2f GiB, %.1f s",
        sizes[-1], len(sizes), record.held() / 2**30, time.monotonic() - began,
    )  # fmt: skip
    return steps
