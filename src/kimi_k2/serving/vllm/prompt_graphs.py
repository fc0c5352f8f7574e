"""Steps with prompts in CUDA graphs of padded sizes; vLLM's own graphs hold decodes alone.

Launched one by one, a short prompt takes the host longer than the GPU. A graph holds what lies between the attentions
of two layers, which treats every token by itself: of one layer all behind attention, of the next all before it. The
attentions are launched between the graphs, since they are as the batch is.

Ranks agree on the sizes, and on whether every one of them could record them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from kimi_k2.engine.batch import Batch
from kimi_k2.engine.graphs import GraphRecorder, Recorded, Recorder, Work, on_all_ranks
from kimi_k2.engine.layer_step import LayerStep
from kimi_k2.engine.prompt_step import NARROWEST, padded_width
from kimi_k2.model.decoder import HiddenStates
from kimi_k2.model.linear import RMSNorm
from kimi_k2.model.moe import MoE
from kimi_k2.ops.linear import add_norm
from kimi_k2.parallel.apply import AllReduce
from kimi_k2.serving.vllm.adapter import Deployment, weak_ref_tensor
from kimi_k2.serving.vllm.ranks import connect, least_of_ranks
from kimi_k2.variables import whole

logger = logging.getLogger("vllm.kimi_k2")

ENVIRONMENT = "KIMI_K2_VLLM_GRAPH_TOKENS"
# New tokens of a step up to which there are graphs: beyond, the GPU is busy while the host launches.
WIDEST = 4096

# Of every rank's number the least.
Least = Callable[[int], int]


class PromptGraphs:
    """The graphs of one model.

    Args:
        steps: the layers.
        norm: of the last hidden states.
        widest: new tokens of a step up to which there are graphs, the same on all ranks.
        record: makes a graph.
        least: of the numbers that all ranks give.
    """

    def __init__(
        self, steps: Sequence[LayerStep], norm: RMSNorm, widest: int, record: Recorder, least: Least = int
    ) -> None:
        self.steps, self.norm, self.record, self.least = steps, norm, record, least
        self.widths = sorted({padded_width(tokens) for tokens in range(NARROWEST, widest + 1, NARROWEST)})
        self.widths = [width for width in self.widths if width <= widest]
        self.widest = self.widths[-1] if self.widths else 0
        weight = norm.weight
        # What lies behind a batch's tokens is finite, so that no expert is chosen by NaN.
        self.x, self.values = (
            torch.zeros(self.widest, size, dtype=weight.dtype, device=weight.device)
            for size in (len(weight), steps[0].width)
        )
        self._pieces: dict[int, list[Recorded]] = {}

    def capture(self) -> str | None:
        """Record all sizes; the widest first, whose memory the others then use. Every rank must call this.

        Returns:
            Why there are none, on all ranks if one of them cannot record a size; None where there are.
        """
        connect([(self.steps[0].reduce, self.x.shape[1], self.x.dtype)], self.x.device, self.widths)
        for width in reversed(self.widths):
            record = partial(self._record, width)
            pieces, reason = on_all_ranks(record, lambda here: bool(self.least(here)))
            if not pieces:
                self._pieces.clear()
                return f"{width} tokens: {reason}"
            self._pieces[width] = pieces
        return None

    def _record(self, width: int) -> list[Recorded]:
        """The pieces of one size."""
        moe = next((number for number, step in enumerate(self.steps) if isinstance(step.layer.mlp, MoE)), 0)
        reduce = self.steps[0].reduce
        # Kernels are built, and find their settings, outside the graphs.
        with reduce.alone() if isinstance(reduce, AllReduce) else nullcontext():
            self._walk(
                width, len(self.steps) if width == self.widest else moe + 1, lambda work: Recorded(work, work(), work)
            )
        return self._walk(width, len(self.steps), self.record, self.record.let_go)

    def _walk(
        self,
        width: int,
        layers: int,
        record: Callable[[Work], Recorded],
        let_go: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> list[Recorded]:
        """The pieces of the first `layers` layers."""
        pieces: list[Recorded] = []
        outputs: tuple[Tensor, ...] = (self.x[:width],)
        for number in range(layers + 1):
            again = record(partial(self._piece, width, layers, number, outputs[-1]))
            if pieces:  # what the piece before it made has been read now
                pieces[-1] = pieces[-1]._replace(made=tuple(map(let_go, outputs)))
            outputs = again.made
            pieces.append(again)
        return [*pieces[:-1], pieces[-1]._replace(made=tuple(map(let_go, outputs)))]

    def _piece(self, width: int, layers: int, number: int, x: Tensor) -> tuple[Tensor, ...]:
        """What lies between two attentions: takes the residual; makes what the second takes, and the residual behind.

        The last makes the hidden states, normed, and behind them as they were.
        """
        delta: Tensor | None = None
        if number:
            x, delta = self.steps[number - 1].leave(x, self.values[:width])
        if number < layers:
            qkv_a, x = self.steps[number].enter(x, delta)
            return qkv_a, self.steps[number].queries(qkv_a), x
        assert delta is not None
        x, normed = add_norm(x, delta, self.norm.weight, self.norm.eps)[:2]
        return normed, x

    def takes(self, tokens: int) -> bool:
        """Whether there is a graph for a step of so many new tokens."""
        return tokens <= self.widest and padded_width(tokens) in self._pieces

    def __call__(self, x: Tensor, batch: Batch, caches: Sequence[Tensor], states: HiddenStates | None = None) -> Tensor:
        """As `PagedModel.run`, whose caches are given here; another step overwrites the normed hidden states."""
        tokens, width = len(x), padded_width(len(x))
        self.x[:tokens].copy_(x)
        # Padding is routed too, and INT4's sums follow how many tokens an expert has: a step may not see earlier ones.
        for buffer in (self.x, self.values):
            buffer[tokens:width].zero_()
        pieces, wanted = self._pieces[width], () if states is None else states.layers
        for number, (step, piece, cache) in enumerate(zip(self.steps, pieces, caches, strict=False)):
            piece.replay()
            qkv_a, q, residual = piece.made
            if states is not None and number in wanted:  # the next piece may take its memory
                states.pass_by(number, residual[:tokens].clone())
            step.attend(qkv_a, q, batch, cache, self.values)
        pieces[-1].replay()
        normed, last = (output[:tokens] for output in pieces[-1].made)
        if states is not None and len(self.steps) in wanted:
            states.pass_by(len(self.steps), last.clone())
        return normed


def prompt_graphs(steps: Sequence[LayerStep], norm: RMSNorm, it: Deployment) -> tuple[PromptGraphs | None, int]:
    """Graphs as a deployment wants them, and the bytes they hold; None without CUDA graphs or where they fail.

    Every rank must call this.
    """
    widest = min(whole(ENVIRONMENT, WIDEST), it.most_tokens)
    if not norm.weight.is_cuda or it.eager or it.graphs == "NONE":
        widest = 0
    widest = least_of_ranks(widest)  # a rank on another host has an environment of its own
    if widest < NARROWEST:
        return None, 0
    began, recorder = time.monotonic(), GraphRecorder(weak_ref_tensor)
    graphs = PromptGraphs(steps, norm, widest, recorder, least_of_ranks)
    reason = graphs.capture()
    if reason is not None:
        logger.warning("kimi-k2: steps with prompts are launched one by one: no graph of them: %s", reason)
        return None, 0
    torch.cuda.synchronize()
    graph_bytes = recorder.held()
    logger.info(
        "kimi-k2: steps with prompts of up to %d tokens are replayed: %d graphs for each of %d sizes, %.2f GiB, %.1f s",
        graphs.widest, len(steps) + 1, len(graphs.widths), graph_bytes / 2**30, time.monotonic() - began,
    )  # fmt: skip
    return graphs, graph_bytes
