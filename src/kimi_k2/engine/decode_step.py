"""A decode step of the plain model without host synchronisation, so that a CUDA graph can hold it; on a CPU too.

`VerifyStep` takes several new tokens a sequence, so that drafts can be verified. Every token is a row of the batch's
decodes: it attends to its sequence's pages up to its own place, where the tokens before it have just been stored. A
row's arithmetic is a plain decode step's; in batch-invariant mode so are its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kimi_k2.engine.batch import Batch, PagedCache
from kimi_k2.engine.graphs import Captured, GraphRecorder, Recorded, Recorder
from kimi_k2.engine.layer_step import LayerStep, Reduce, alone, through
from kimi_k2.errors import KernelError
from kimi_k2.model.decoder import DecoderLayer, HiddenStates, KimiK2ForCausalLM
from kimi_k2.model.moe import MoE
from kimi_k2.ops.experts import routed_experts
from kimi_k2.ops.linear import Weight, add_project
from kimi_k2.ops.mla import attention_plan, chunk_slots, decode_places
from kimi_k2.ops.registry import PLAIN, computing
from kimi_k2.ops.streams import beside


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
    """Logits of one new token a sequence; on a GPU replayed from a graph after the first call.

    Args:
        model: whole, or a rank's part from `parallel.parallelize`.
        cache: with room for every position; attention runs over all its slots and masks those that lie ahead.
        reduce, gather: sum over ranks, and concatenation of the ranks' logits; the identity for one rank.
        graph: capture.
        layers: of another step of this model; None makes them.

    Raises:
        KernelError: `graph`, but the step is not `capturable`.
    """

    def __init__(
        self,
        model: KimiK2ForCausalLM,
        cache: PagedCache,
        *,
        reduce: Reduce = alone,
        gather: Reduce = alone,
        graph: bool = False,
        layers: Sequence[LayerStep] | None = None,
    ) -> None:
        batch, device = cache.batch, cache.data.device
        if graph and not capturable(model, batch):
            raise KernelError(f"a graph needs a GPU and experts that a kernel takes: {model.dtype} on {device}")
        model.prepare()
        self.model, self.cache = model, cache
        self.reduce, self.gather = reduce, gather
        self.layers: list[LayerStep] = list(layers or ())
        for layer in () if layers else model.model.layers:
            assert isinstance(layer, DecoderLayer)
            self.layers.append(self.make_layer(layer, reduce))
        self.head_weight = Weight({"weight": model.lm_head.weight})
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self.record: Recorder | None = GraphRecorder() if graph else None
        self._recorded: Recorded | None = None

    def make_layer(self, layer: DecoderLayer, reduce: Reduce) -> LayerStep:
        """The step of the model's next layer."""
        return LayerStep(layer, reduce)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """int64 [B] and int64 [B], inside the cache, to logits [B, vocab_size], which the next call overwrites."""
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        if self.record is None:
            return self.run()
        if self._recorded is None:
            self.run()  # builds, scratch memory and communicators are made outside the capture
            self._recorded = self.record(lambda: (self.run(),))
        self._recorded.replay()
        return self._recorded.made[0]

    def close(self) -> None:
        """Give the graph up: NCCL ends a group only when no graph holds launches of it. Another call captures anew."""
        if self._recorded is not None:
            self._recorded.reset()
        self._recorded = None

    def run(self) -> Tensor:
        """The step on `tokens` and `positions`, launch by launch."""
        with computing(batch_invariant=self.model.batch_invariant, decoding=True):
            x = self.model.model.embed_tokens(self.tokens)
            return self.head(*through(self.layers, x, self.batch(self.positions, x.dtype), self.cache.data))

    def batch(self, positions: Tensor, dtype: torch.dtype) -> Batch:
        """One new token a sequence at int64 [B] positions; cos and sin in `dtype`."""
        cache = self.cache
        seq_lens, slots = decode_places(positions, cache.block_table, cache.page)
        return self.rows(positions, seq_lens, slots, cache.table, dtype)

    def rows(
        self, positions: Tensor, seq_lens: Tensor, slots: Tensor, table: Tensor | None, dtype: torch.dtype
    ) -> Batch:
        """Rows of one new token each; `seq_lens`, `slots` and `table` as `Batch` has them."""
        count, cache = len(positions), self.cache
        plan_inputs = seq_lens, cache.data[0], len(self.layers[0].w_uk), table
        rotary, plan = partial(self.model.model.rotary, positions, dtype), None
        if attention_plan.choose(*plan_inputs).name == PLAIN:
            rotation = rotary()
        else:  # One block makes the plan: the rest of the GPU goes on beside it.
            plan, rotation = beside(partial(attention_plan, *plan_inputs), rotary, positions.device)
        return Batch(count, count, seq_lens, slots, table, rotation=rotation, plan=plan)

    def head(self, x: Tensor, delta: Tensor) -> Tensor:
        """Logits of the last layer's x + delta [B, H]."""
        norm = self.model.model.norm
        return self.gather(add_project(x, delta, self.head_weight, norm.weight, norm.eps)[0])


class VerifyStep:
    """A step of a few tokens a sequence over a decode step's layers and cache; on a GPU a graph for each width.

    Args:
        step: gives model, cache, layers and the sums over ranks; its `record` says whether widths are captured.
        aux_layers: of `HiddenStates`.
    """

    def __init__(self, step: DecodeStep, aux_layers: tuple[int, ...] = ()) -> None:
        self.step, self.aux_layers = step, aux_layers
        self._captured: dict[int, Captured] = {}

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
            captured = self._captured[width] = Captured((tokens, positions), graph)
        logits, aux = captured(tokens, positions)
        return logits, aux if self.aux_layers else None

    def run(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The step, launch by launch; without `aux_layers` the second result is the first."""
        step, cache, (rows, width) = self.step, self.step.cache, tokens.shape
        states = HiddenStates(self.aux_layers)
        with computing(batch_invariant=step.model.batch_invariant, decoding=True):
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
