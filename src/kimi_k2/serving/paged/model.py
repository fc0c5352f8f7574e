"""A rank's part of Kimi-K2 over an engine's cache in pages: weights, layers one after the other, logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import Batch, planned
from kimi_k2.engine.layer_step import Exchange, LayerStep, Place, through
from kimi_k2.model.decoder import DecoderLayer, HiddenStates, KimiK2ForCausalLM
from kimi_k2.ops import registry
from kimi_k2.ops.collective import gather_last
from kimi_k2.ops.linear import add_norm, float32_linear
from kimi_k2.parallel.apply import AllReduce, VocabParallelEmbedding, parallelize
from kimi_k2.serving.paged.heads import kernel_heads, pad_heads
from kimi_k2.serving.paged.support import held_by_ranks
from kimi_k2.serving.paged.weights import RankLoader
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.plan import make_plan


class Held(Protocol):
    """A layer's cache in an engine's hands."""

    @property
    def cache(self) -> Tensor:
        """[pages, slots a page, cache_dim]."""
        ...

    def batch(self) -> Batch | None:
        """What this step computes; None while the engine measures memory, when there is no cache yet."""
        ...


@dataclass(frozen=True)
class Share:
    """What one rank has of a model.

    Attributes:
        layout: how the ranks share it.
        rank: this one, among all.
        group: the process group of the ranks of a replica.
        exchange: of tokens among replicas, where the layout has some.
        layers: those of a pipeline's stage, which holds embedding and head besides; None for all.
        redundant: routed experts of a layer that are held beside the model's.
    """

    layout: Layout
    rank: int
    group: torch.distributed.ProcessGroup
    exchange: Exchange | None = None
    layers: range | None = None
    redundant: int = 0


class PagedModel:
    """The model of one rank.

    Args:
        config: of the language model.
        share: of the rank.
        held: the cache of each layer that it has.
        dtype: of what no format quantizes.
        device: of the weights.

    Attributes:
        places: by layer where its experts are held, if not by their own numbers; before the layers are made.
    """

    def __init__(
        self,
        config: KimiK2Config,
        share: Share,
        held: Sequence[Held],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layout, rank, layers = share.layout, share.rank, share.layers
        held_config = held_by_ranks(config, layout)
        with torch.device("meta"):
            plain = KimiK2ForCausalLM(held_config, dtype=dtype, keep_quantized=True)
        self.layers = layers or range(config.num_hidden_layers)
        self.plain = parallelize(
            plain, layout, rank, device=device, group=share.group, layers=layers, redundant=share.redundant
        ).eval()
        for number in set(range(config.num_hidden_layers)).difference(self.layers):
            self.plain.model.layers[number] = nn.Identity()
        self.loader = RankLoader(self.plain, replace(make_plan(held_config, layout), config=config), rank, layers)
        self.group, self.held = share.group, held
        self.reduce, self.exchange = AllReduce(share.group, layout.dense > 1), share.exchange
        self.places: Mapping[int, Place] = {}
        self.make_step: Callable[[DecoderLayer, int], LayerStep] = self._make_step
        self._steps: list[LayerStep] | None = None

    @torch.inference_mode()  # in which the steps' tensors were made
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take tensors of a checkpoint: all, or a part; also in the place of those that already serve.

        No step may run meanwhile. CUDA graphs stay as they are, with the new weights.

        Returns:
            Names in `plain` of what has been filled since the start.

        Raises:
            CheckpointError: (subclasses) a tensor that is unknown or of another shape or dtype.
        """
        try:
            return self.loader.load(weights)
        finally:
            if self._steps is not None:
                self.plain.prepare()
                for number in self.loader.touched:
                    self._steps[number - self.layers.start].renew()
            self.loader.touched.clear()

    @torch.no_grad()
    def randomize(self) -> None:
        """Random weights for an engine that loads none; packed INT4 stays as the memory is, no exponent is NaN."""
        for tensor in (*self.plain.parameters(), *self.plain.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.empty(tensor.shape, device=tensor.device).uniform_(-1e-3, 1e-3))
            elif tensor.dtype == torch.uint8:
                tensor.fill_(112)

    @property
    def steps(self) -> list[LayerStep]:
        """The layers, made when they first run: by then weights are there, real or an engine's random ones."""
        return self._steps or self.make_steps()

    def make_steps(self) -> list[LayerStep]:
        """The layers, made of the weights now.

        Raises:
            MissingTensorError: some of the checkpoint's tensors came, and others did not.
        """
        self.loader.check()
        self.plain.prepare()
        self._steps = []
        for number in self.layers:
            layer = self.plain.model.layers[number]
            assert isinstance(layer, DecoderLayer)
            step = self.make_step(layer, number)
            heads = kernel_heads(len(step.w_uk)) if step.w_uk.is_cuda else None
            if heads is not None:
                pad_heads(step, heads)
            self._steps.append(step)
        return self._steps

    def _make_step(self, layer: DecoderLayer, number: int) -> LayerStep:
        return LayerStep(layer, self.reduce, self.exchange, self.places.get(number))

    def embed(self, input_ids: Tensor) -> Tensor:
        """int64 [T] to [T, H]."""
        embedded: Tensor = self.plain.model.embed_tokens(input_ids)
        return embedded

    def batch(self, positions: Tensor, x: Tensor) -> Batch | None:
        """What all layers are told of the new tokens, int64 [T], whose embeddings are x; None before there is a cache.

        Attention over pages takes lengths from the engine's batch.

        Raises:
            MissingTensorError: the weights have been emptied (`RankLoader.forget`), and have not all come again.
        """
        if self.loader.emptied:
            self.loader.check()
        batch = self.held[0].batch()
        if batch is None:
            return None
        step = replace(batch, rotation=self.plain.model.rotary(positions, x.dtype))
        if step.decodes:
            lengths, table = step.single.seq_lens, step.single.block_table
            heads = len(self.steps[0].w_uk) * (1 if step.spread is None else step.spread.ranks)
            step.plan = planned(lengths, self.held[0].cache, heads, table)
        return step

    def run(self, x: Tensor, batch: Batch | None, states: HiddenStates | None = None) -> Tensor:
        """Embedded new tokens [T, H] to normed hidden states [T, H]; `states` sees those between layers."""
        return self.norm(*self.through(x, None, batch, states))

    def through(
        self, x: Tensor, delta: Tensor | None, batch: Batch | None, states: HiddenStates | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layers here, of a residual and what is yet to be added to it; see `layer_step.through`."""
        caches = (None if batch is None else layer.cache for layer in self.held)
        return through(self.steps, x, batch, caches, states, delta)

    def norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Normed hidden states [T, H] behind the last layer."""
        norm = self.plain.model.norm
        return add_norm(x, delta, norm.weight, norm.eps)[1]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[N, H] to float32 [N, vocab_size]: of a near tie no rounding decides."""
        return self._gather(float32_linear(hidden_states, self.plain.lm_head.weight))

    def exchanges(self) -> list[tuple[Callable[[Tensor], Tensor], int, torch.dtype]]:
        """What ranks do together in a step from tokens to logits; a row's number of values, and their dtype."""
        head, embedding = self.plain.lm_head.weight, self.plain.model.embed_tokens
        assert isinstance(embedding, VocabParallelEmbedding)
        (rows, hidden), wide = head.shape, torch.promote_types(head.dtype, torch.float32)
        sums = [(reduce, hidden, head.dtype) for reduce in (embedding.reduce, self.reduce)]
        return [*sums, (self._gather, rows, wide)]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No exchange meanwhile, as `AllReduce.alone`; logits are then those of this rank's part of the vocabulary."""
        embedding = self.plain.model.embed_tokens
        assert isinstance(embedding, VocabParallelEmbedding)
        with self.reduce.alone(), embedding.reduce.alone():
            yield

    def _gather(self, logits: Tensor) -> Tensor:
        """The whole vocabulary's, of this rank's part [N, n]."""
        return gather_last(logits, self.group) if self.reduce.active else logits


def started(model: KimiK2ForCausalLM, engine: str, does: str) -> str:
    """The line at start: whose operations run, and why; what the engine does whichever model runs."""
    ours = ", ".join(registry.TABLE) if model.lm_head.weight.is_cuda else ""
    why = f" ({ours})" if ours else ", plain ones, since this is a CPU"
    return f"kimi-k2: operations are ours{why}; {does} are {engine}'s"
