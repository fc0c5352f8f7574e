"""Steps that verify drafts, of requests that each have as many, prepared on the GPU; and the drafts that follow.

As `decode_steps`, with one new token and all of its drafts a request. vLLM's rejection sampler runs between two graphs:
that of the target with its inputs, and that of its drafter's passes, which for few requests take less time than vLLM
takes to prepare them on the host. What is recorded of these is vLLM's own `propose`, over buffers that stay in place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_k2.engine.batch import Batch
from kimi_k2.engine.graphs import CANNOT, Recorded, Recorder
from kimi_k2.ops.mla import token_places
from kimi_k2.serving.vllm.decode_steps import DecodeSteps, Forward
from kimi_k2.serving.vllm.runner import Runner
from kimi_k2.serving.vllm.verifying_runner import VerifyingRunner

logger = logging.getLogger("vllm.kimi_k2")


class VerifySteps(DecodeSteps):
    """Those of one runner of vLLM's.

    Args:
        runner: it, with drafts.
        model: ours in it.
        sizes: of batches, in requests, to which others are padded, ascending.
    """

    runner: VerifyingRunner

    def __init__(self, runner: Runner, model: Any, sizes: Sequence[int]) -> None:
        most = sizes[-1]
        super().__init__(VerifyingRunner(runner.worker, most), model, sizes)
        pages, rows = self.runner.pages, most * self.runner.width
        self.lengths, self.row_lens = pages.new_full((most,), -1), pages.new_zeros(rows)
        self.row_pages = pages.new_zeros(rows, pages.shape[1])
        self.places = torch.arange(self.runner.width, device=pages.device)
        self.next, self.accepted = pages.new_zeros(most), pages.new_full((most,), self.runner.width)
        self._drafts: dict[int, Recorded] = {}
        self._behind: tuple[Any, int, Sequence[Tensor]] = (None, 0, ())
        reason = self.runner.against_drafts()
        self._stock: Any = self.runner.drafts_by(self.propose) if reason is None else None
        if reason is not None:
            logger.info("kimi-k2: passes of the drafter are prepared by vLLM: %s", reason)

    def _more(self, size: int, recorded: Recorded, record: Recorder) -> list[Recorded]:
        if self._stock is None:
            return []
        recorded.replay()  # so that what the passes take is finite
        aux = recorded.made[2:]
        try:
            self.draft(size, aux)  # builds kernels
            self._drafts[size] = record(lambda: (self.draft(size, aux),))
        except CANNOT as error:
            logger.warning("kimi-k2: passes of the drafter are prepared by vLLM: no graph of them: %s", error)
            for graph in self._drafts.values():
                graph.reset()
            self._stock = self.runner.drafts_by(None)
            return []
        return [self._drafts[size]]

    def _begin(self, computed: Tensor | None, size: int) -> None:
        assert computed is not None
        self.lengths[: len(computed)].copy_(computed)
        self.lengths[len(computed) : size].fill_(-1)

    def _follow(self, scheduled: Any, size: int, aux: Sequence[Tensor]) -> None:
        if self._stock is not None:
            self._behind = scheduled, size, aux

    def propose(self, scheduled: Any, sampled: Any, *args: Any) -> Any:
        """In place of vLLM's runner's own: drafted tokens int64 [requests, drafts]."""
        behind, size, aux = self._behind
        self._behind = (None, 0, ())
        if scheduled is not behind:
            return self._stock(scheduled, sampled, *args)
        following, accepted = self.runner.following(sampled)
        count = len(following)
        self.next[:count].copy_(following)
        self.accepted[:count].copy_(accepted)
        self.accepted[count:size].fill_(self.runner.width)
        graph = self._drafts.get(size)
        if graph is None:
            return self.draft(size, aux)[:count]
        graph.replay()
        return graph.made[0][:count].clone()  # while the host reads it, another step may have begun

    def draft(self, size: int, aux: Sequence[Tensor]) -> Tensor:
        """Of vLLM's drafter behind a step of so many requests, launch by launch."""
        return self.runner.draft(size, aux, self.next[:size], self.accepted[:size])

    def _work(self, size: int) -> Forward:
        """A step of so many requests over the runner's buffers.

        Returns:
            Hidden states [size * width, H], logits [size * width, vocab_size], and the states that a head wants.
        """
        held, width = self.runner.buffers(size), self.runner.width
        rows = size * width
        lengths, pages, drafted = self.lengths[:size], self.runner.pages[:size], self.runner.drafted[: rows - size]
        row_lens, row_pages = self.row_lens[:rows], self.row_pages[:rows]
        batch = Batch(rows, rows, row_lens, held.slots, row_pages)

        def work() -> tuple[Tensor, ...]:
            there = lengths.unsqueeze(1) >= 0
            at = torch.where(there, lengths.unsqueeze(1) + self.places, -1)
            torch.mul(held.pages, there, out=pages)  # page 0 is nobody's
            row_pages.copy_(pages.repeat_interleave(width, dim=0, output_size=rows))
            lens, slots = token_places(at, pages, held.page)
            row_lens.copy_(lens)
            held.slots.copy_(slots)
            held.positions.copy_(at.clamp(min=0).flatten())
            held.seq_lens.copy_(at[:, -1] + 1)
            held.ids.view(size, width).mul_(there)
            drafted.view(size, width - 1).copy_(held.ids.view(size, width)[:, 1:])
            held.discarded.zero_()
            return self.through(batch, held.ids, held.positions)

        return work
