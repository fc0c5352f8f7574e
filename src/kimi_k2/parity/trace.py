"""What one run shows of itself: outputs of named points in the order in which they are computed.

A run is one prompt (phase `prefill`) and then forced tokens, one a step (phase `decode`), so that two backends see the
same inputs whatever they would have chosen. A key is `phase/point`; the points of a decoder layer begin with
`layers.N.`. Each value has a row for every kept position of its phase.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error

PHASES = ("prefill", "decode")
_LAYER = re.compile(r"layers\.(\d+)\.")

# Points of a layer in the order of computation; a backend need not have all of them. `kv_cache` and `k_pe` are the two
# parts of the entry that the cache holds at the token's own position after the step; `.small` is what a norm makes of
# `small_activations`, once a run.
ATTENTION_POINTS = (
    "input_layernorm", "input_layernorm.small", "self_attn.q_a_proj", "self_attn.q_a_layernorm",
    "self_attn.q_a_layernorm.small", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm",
    "self_attn.kv_a_layernorm.small", "self_attn.kv_cache", "self_attn.rope.k_pe", "self_attn.attention",
    "self_attn.o_proj", "post_attention_layernorm", "post_attention_layernorm.small",
)  # fmt: skip
NORMS = ("input_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "post_attention_layernorm")
MOE_POINTS = ("mlp.gate.selection", "mlp.gate.weights", "mlp.experts", "mlp.shared_experts")
LAST_POINTS = ("mlp", "output")


class ParityError(KimiK2Error):
    """Two runs cannot be compared, or a golden file cannot be used; the message says which and what was expected."""


Token = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class Inputs:
    """What a run is given.

    Attributes:
        prompt: token ids.
        forced: token ids fed at decode, one a step.
        layers: decoder layers whose points are kept; None for all.
        kept_positions: last positions of the prompt that are kept.
    """

    prompt: Sequence[Token]
    forced: Sequence[Token]
    layers: Sequence[int] | None = None
    kept_positions: int = 16

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ParityError("prompt: expected at least one token")
        if self.kept_positions < 1:
            raise ParityError(f"kept_positions: expected at least 1, got {self.kept_positions}")

    def keeps(self, point: str) -> bool:
        """Whether the point belongs to a kept layer, or to none."""
        layer = layer_of(point)
        return layer is None or self.layers is None or layer in self.layers

    def calls(self) -> Iterator[tuple[str, list[int], int]]:
        """Phase, tokens and the first one's position of each call: the prompt, and the forced tokens one by one."""
        yield "prefill", list(self.prompt), 0
        for position, token in enumerate(self.forced, len(self.prompt)):
            yield "decode", [token], position

    def rows(self, phase: str) -> int:
        """Kept rows of a phase."""
        return min(self.kept_positions, len(self.prompt)) if phase == "prefill" else len(self.forced)


@dataclass
class Trace:
    """Outputs by `phase/point` on the CPU, [rows, ...]: float32, float64 of a float64 run, integers for selections."""

    inputs: Inputs
    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, phase: str, point: str, value: Tensor) -> None:
        """Keep a prefill's last rows, or one more row of decode; `value` is [tokens, ...]."""
        if not self.inputs.keeps(point):
            return
        value = value.detach()
        narrow = value.is_floating_point() and value.dtype != torch.float64
        value = value.to("cpu", torch.float32) if narrow else value.cpu()
        key = f"{phase}/{point}"
        if phase == "prefill":
            # A copy: a view would keep the whole prompt's activations in memory.
            self.values[key] = value[-self.inputs.kept_positions :].clone()
        else:
            self.values[key] = torch.cat((self.values[key], value)) if key in self.values else value.clone()

    def logits(self, phase: str) -> Tensor:
        """[rows, vocab_size].

        Raises:
            ParityError: there are none.
        """
        key = f"{phase}/lm_head"
        if key not in self.values:
            raise ParityError(f"the run has no logits of its {phase}")
        return self.values[key]


def layer_of(point: str) -> int | None:
    """The decoder layer that a point belongs to."""
    match = _LAYER.match(point)
    return int(match[1]) if match else None


def order(config: KimiK2Config) -> list[str]:
    """All points in the order of computation."""
    points = ["embed_tokens", "rope.cos_sin"]
    for layer in range(config.num_hidden_layers):
        own = ATTENTION_POINTS + (MOE_POINTS if config.is_moe_layer(layer) else ()) + LAST_POINTS
        points += [f"layers.{layer}.{point}" for point in own]
    return [*points, "norm", "norm.small", "lm_head"]


def small_activations(width: int) -> Tensor:
    """[1, width], with a mean square of 3.3e-7, less than a norm's epsilon.

    A mean square of real activations is about 1, and a wrong epsilon no more than float32's rounding.
    """
    return torch.linspace(-1e-3, 1e-3, width, dtype=torch.float64)[None]


def captured_bytes(config: KimiK2Config, inputs: Inputs) -> int:
    """Size of a trace of the plain model, from the widths of its points."""
    heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    attention = (
        hidden + 2 * config.q_lora_rank + heads * config.qk_head_dim + config.cache_dim + 2 * rank
        + config.qk_rope_head_dim + heads * config.v_head_dim + 2 * hidden
    )  # fmt: skip
    values = 2 * hidden + config.qk_rope_head_dim
    for layer in range(config.num_hidden_layers):
        if inputs.layers is None or layer in inputs.layers:
            values += attention + 2 * hidden
            if config.is_moe_layer(layer):
                values += 2 * hidden + 3 * config.num_experts_per_tok  # int64 indices count twice
    rows = sum(inputs.rows(phase) for phase in PHASES)
    kept = config.num_hidden_layers if inputs.layers is None else len(inputs.layers)
    probes = config.hidden_size + kept * (2 * config.hidden_size + config.q_lora_rank + config.kv_lora_rank)
    return 4 * (rows * values + (1 + len(inputs.forced)) * config.vocab_size + probes)
