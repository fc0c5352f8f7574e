"""Logits of several new tokens a sequence, each as a decode step computes it, so that drafts can be verified.

Every token is a row of the batch's decodes: it attends to its sequence's pages up to its own place, where the tokens
before it have just been stored. A row's arithmetic is a plain decode step's; in batch-invariant mode so are its bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.engine.decode_step import DecodeStep, capturable, through
from kimi_k2.engine.graphs import Recorded
from kimi_k2.model.hidden_states import HiddenStates
from kimi_k2.ops.cache import chunk_slots
from kimi_k2.ops.registry import decoding


class _Captured(NamedTuple):
    tokens: Tensor
    positions: Tensor
    graph: Recorded


class VerifyStep:
    """A step of a few tokens a sequence over a decode step's layers and cache; on a GPU a graph for each width.

    Args:
        step: gives model, cache, layers and the sums over ranks; its `record` says whether widths are captured.
        aux_layers: of `HiddenStates`.
    """

    def __init__(self, step: DecodeStep, aux_layers: tuple[int, ...] = ()) -> None:
        self.step, self.aux_layers = step, aux_layers
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """New tokens and their logits.

        Args:
            tokens: int64 [B, S].
            positions: int64 [B, S], ascending in a sequence and inside the cache; negative for padding, which is not
                stored and whose results mean nothing.

        Returns:
            Logits [B, S, vocab_size] and the hidden states [B, S, layers * H] of `aux_layers`, None without any; the
            next call overwrites both.
        """
        device = self.step.cache.data.device
        rows, width = tokens.shape
        captured = self._captured.get(width)
        if captured is None:
            tokens, positions = (torch.empty_like(one, device=device).copy_(one) for one in (tokens, positions))
            made = self.run(tokens, positions)
            if self.step.record is None or not capturable(self.step.model, rows * width):
                return made[0], made[1] if self.aux_layers else None
            graph = self.step.record(lambda: self.run(tokens, positions))
            captured = self._captured[width] = _Captured(tokens, positions, graph)
        captured.tokens.copy_(tokens)
        captured.positions.copy_(positions)
        captured.graph.replay()
        logits, aux = captured.graph.made
        return logits, aux if self.aux_layers else None

    def run(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The step, launch by launch; without `aux_layers` the second result is the first."""
        step, cache, (rows, width) = self.step, self.step.cache, tokens.shape
        states = HiddenStates(self.aux_layers)
        with decoding():
            x = step.model.model.embed_tokens(tokens.flatten())
            slots = chunk_slots(positions, cache.block_table, cache.page).flatten()
            table = cache.block_table.repeat_interleave(width, dim=0)
            flat = positions.flatten()
            batch = step.rows(flat.clamp(min=0), (flat + 1).to(torch.int32), slots, table, x.dtype)
            logits = step.head(*through(step.layers, x, batch, cache.data, states)).view(rows, width, -1)
        return logits, states.joined().view(rows, width, -1) if self.aux_layers else logits

    def close(self) -> None:
        """Give the graphs up, as `DecodeStep.close`."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()
