"""A decode step of the plain model without host synchronisation, so that a CUDA graph can hold it; on a CPU too.

A sequence has one new token, or several, so that drafts can be verified. Every token is a row of the batch's decodes:
it attends to its sequence's pages up to its own place, where the tokens before it have just been stored. A row's
arithmetic is that of one token a sequence; in batch-invariant mode so are its bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k2.engine.batch import Batch, planned
from kimi_k2.engine.graphs import Captured, GraphRecorder, Recorder, give_up
from kimi_k2.engine.layer_step import LayerStep, Reduce, alone, through
from kimi_k2.errors import KernelError
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import DecoderLayer, HiddenStates, KimiK2ForCausalLM
from kimi_k2.model.moe import MoE
from kimi_k2.ops.experts import routed_experts
from kimi_k2.ops.linear import Weight, add_project
from kimi_k2.ops.mla import token_places
from kimi_k2.ops.registry import PLAIN, computing


def capturable(model: KimiK2ForCausalLM, batch: int) -> bool:
    """Whether a graph can hold a step of `batch` tokens: on a GPU, with experts that a kernel takes.

    The plain function for experts reads the routing back, which would end the process in the middle of a capture.
    """
    device = model.lm_head.weight.device
    if device.type != "cuda":
        return False
    model.prepare()
    x = torch.empty(batch, model.config.hidden_size, dtype=model.dtype, device=device)
    chosen = batch, model.config.num_experts_per_tok
    routing = torch.zeros(chosen, dtype=torch.int64, device=device), torch.zeros(chosen, device=device)
    moe = next((module for module in model.modules() if isinstance(module, MoE)), None)
    with computing(batch_invariant=model.batch_invariant, decoding=True):
        return moe is None or routed_experts.choose(x, moe.experts.stored(), *routing).name != PLAIN


class DecodeStep:
    """Logits of the new tokens of each sequence; on a GPU replayed from a graph of their number after the first call.

    Args:
        model: whole, or a rank's part from `parallel.parallelize`.
        cache: with room for every position; attention runs over all its slots and masks those that lie ahead.
        reduce, gather: sum over ranks, and concatenation of the ranks' logits; the identity for one rank.
        graph: capture.
        layers: of another step of this model; None makes them.
        aux_layers: of `HiddenStates`.

    Raises:
        KernelError: `graph`, but the step of a token a sequence is not `capturable`.
    """

    def __init__(
        self,
        model: KimiK2ForCausalLM,
        cache: LatentCache,
        *,
        reduce: Reduce = alone,
        gather: Reduce = alone,
        graph: bool = False,
        layers: Sequence[LayerStep] | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        if graph and not capturable(model, cache.batch):
            device = cache.data.device
            raise KernelError(f"a graph needs a GPU and experts that a kernel takes: {model.dtype} on {device}")
        model.prepare()
        self.model, self.cache, self.aux_layers = model, cache, aux_layers
        self.reduce, self.gather = reduce, gather
        own = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
        self.layers = list(layers or [LayerStep(layer, reduce) for layer in own])
        self.head_weight = Weight({"weight": model.lm_head.weight})
        self.record: Recorder | None = GraphRecorder() if graph else None
        self._captured: dict[torch.Size, Captured] = {}

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """int64 [B] and int64 [B], inside the cache, to logits [B, vocab_size], which the next call overwrites."""
        return self.verify(tokens, positions)[0]

    @torch.inference_mode()
    def verify(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """New tokens and their logits.

        Args:
            tokens: int64 [B], or [B, S] of a cache in pages.
            positions: int64 as `tokens`, ascending in a sequence and inside the cache; of [B, S] negative for padding,
                which is not stored and whose results mean nothing.

        Returns:
            Logits [B, vocab_size] or [B, S, vocab_size], and the hidden states [..., layers * H] of `aux_layers`, None
            without any; the next call overwrites both.
        """
        captured = self._captured.get(tokens.shape)
        if captured is None:
            tokens, positions = (x.to(self.cache.data.device, copy=True) for x in (tokens, positions))
            made = self.run(tokens, positions)  # builds, scratch memory and communicators are made outside the capture
            if self.record is not None and capturable(self.model, tokens.numel()):
                graph = self.record(lambda: self.run(tokens, positions))
                captured = self._captured[tokens.shape] = Captured((tokens, positions), graph)
        if captured is not None:
            made = captured(tokens, positions)
        return made[0], made[1] if self.aux_layers else None

    def close(self) -> None:
        """Give the graphs up. Another call captures anew."""
        give_up(self._captured)

    def run(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The step, launch by launch; arguments on the model's device."""
        states = HiddenStates(self.aux_layers)
        with computing(batch_invariant=self.model.batch_invariant, decoding=True):
            x = self.model.model.embed_tokens(tokens.flatten())
            batch = self.batch(positions, x.dtype)
            logits = self.head(*through(self.layers, x, batch, self.cache.data, states)).view(*tokens.shape, -1)
        return (logits, states.joined().view(*tokens.shape, -1)) if self.aux_layers else (logits,)

    def batch(self, positions: Tensor, dtype: torch.dtype) -> Batch:
        """Rows of one new token each at int64 [B] or [B, S] positions; cos and sin in `dtype`."""
        cache, count, table = self.cache, positions.numel(), self.cache.table
        seq_lens, slots = token_places(positions, cache.block_table, cache.page)
        if positions.ndim > 1:
            table = cache.block_table.repeat_interleave(positions.shape[1], dim=0)
        plan = planned(seq_lens, cache.data[0], len(self.layers[0].w_uk), table)
        rotation = self.model.model.rotary(positions.flatten(), dtype)
        return Batch(count, count, seq_lens, slots, table, rotation=rotation, plan=plan)

    def head(self, x: Tensor, delta: Tensor) -> Tensor:
        """Logits of the last layer's x + delta [B, H]."""
        norm = self.model.model.norm
        return self.gather(add_project(x, delta, self.head_weight, norm.weight, norm.eps)[0])
