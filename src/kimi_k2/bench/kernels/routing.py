"""Routings that a benchmark prescribes, since a synthetic router's choices are skewed in no known way.

The router runs as it does, so that its time counts; then its choice is replaced by a drawn one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.engine.layer_step import LayerStep, Reduce
from kimi_k2.engine.layer_step import Routing as Chosen
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import DecoderLayer, KimiK2ForCausalLM
from kimi_k2.model.moe import Experts


@dataclass(frozen=True)
class Routing:
    """How tokens choose among E experts.

    Attributes:
        exponent: an expert's share falls with this power of its rank (Zipf); 0 is uniform, infinity sends all tokens
            to the same experts.
    """

    exponent: float

    @classmethod
    def parse(cls, text: str) -> Routing:
        """`uniform`, `same`, or `zipf:EXPONENT`.

        Raises:
            ConfigError: anything else.
        """
        kind, _, exponent = text.partition(":")
        if kind == "zipf" and exponent:
            try:
                skew = float(exponent)
            except ValueError:
                skew = -1.0
            if 0 <= skew < 100:
                return cls(skew)
        elif text in ("uniform", "same"):
            return cls(0.0 if text == "uniform" else float("inf"))
        raise ConfigError(f"expected uniform, same or zipf:EXPONENT, got {text!r}", field="routing")

    def draw(self, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> Chosen:
        """Distinct experts a token, drawn without replacement, and weights that sum to 2.827.

        Returns:
            int64 [tokens, top_k] and float32 [tokens, top_k] on the generator's device.
        """
        device = generator.device
        order = torch.randperm(experts, device=device, generator=generator)
        if self.exponent == float("inf"):
            indices = order[:top_k].repeat(tokens, 1)
        else:
            ranks = torch.arange(1, experts + 1, device=device, dtype=torch.float64)
            # Gumbel's noise: the largest of log p + noise are a draw without replacement.
            noise = -torch.empty(tokens, experts, dtype=torch.float64, device=device)
            noise = -noise.exponential_(generator=generator).log()
            indices = order[(noise - self.exponent * ranks.log()).topk(top_k, dim=-1).indices]
        weights = torch.rand(tokens, top_k, device=device, generator=generator) + 0.1
        return indices, weights / weights.sum(-1, keepdim=True) * 2.827


class DrawnLayerStep(LayerStep):
    """A layer whose tokens go to drawn experts, the same ones at every step; another layer's are others.

    Args:
        layer, reduce: see LayerStep.
        routing: how they are drawn.
        seed: of the draw.
    """

    def __init__(self, layer: DecoderLayer, reduce: Reduce, routing: Routing, seed: int) -> None:
        super().__init__(layer, reduce)
        self.routing, self.seed = routing, seed
        self._drawn: dict[int, Chosen] = {}

    def drawn(self, x: Tensor) -> Chosen:
        """For the tokens x [T, H]: indices and weights, each [T, top_k]."""
        tokens = x.shape[0]
        if tokens not in self._drawn:
            assert self.moe is not None
            generator = torch.Generator(x.device).manual_seed(self.seed)
            experts: Experts = self.moe.experts
            self._drawn[tokens] = self.routing.draw(tokens, self.moe.gate.top_k, experts.total_experts, generator)
        return self._drawn[tokens]

    def distinct(self, x: Tensor) -> int:
        """How many of this rank's experts the tokens x [T, H] reach; 0 in a dense layer."""
        if self.moe is None:
            return 0
        local = self.drawn(x)[0].unique() - self.moe.experts.first_expert
        return int(((local >= 0) & (local < self.moe.experts.num_experts)).sum())

    def feed_forward(self, x: Tensor, routing: Chosen | None = None) -> Tensor:
        """As LayerStep's; the router's choice, already made, is replaced."""
        if self.moe is None:
            return super().feed_forward(x)
        return super().feed_forward(x, self.drawn(x))


def drawn_layers(model: KimiK2ForCausalLM, reduce: Reduce, routing: Routing) -> list[LayerStep]:
    """A decode step's, each of which draws by its number."""
    model.prepare()
    layers = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
    return [DrawnLayerStep(layer, reduce, routing, number) for number, layer in enumerate(layers)]
