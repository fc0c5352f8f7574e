"""Bytes that one logical core must hold: weights as NeuronKimiK2ForCausalLM places them, and the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kimi_k2.config import KimiK2Config
from kimi_k2.neuron.preset import NeuronPreset

BANK_BYTES = 24 * 10**9  # HBM of one logical core at LNC=2: 96 GB a chip of four
BF16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class Footprint:
    """Bytes a core by what they are for; code, activations and the runtime's own come on top."""

    attention: int
    dense_mlp: int
    shared_experts: int
    routed_experts: int
    router: int
    embedding_and_head: int
    cache: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(vars(self).values())

    @property
    def fits(self) -> bool:
        """Whether the sum is below one core's bank."""
        return self.total <= BANK_BYTES


def footprint(config: KimiK2Config, preset: NeuronPreset) -> Footprint:
    """Bytes a core holds of `config` under `preset`; norms and rank numbers (kilobytes) are left out."""
    ranks, hidden = preset.ranks, config.hidden_size
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    moe_layers = sum(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))
    split = (
        hidden * (config.q_lora_rank + config.cache_dim)
        + config.q_lora_rank * heads * config.qk_head_dim
        + rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        + heads * config.v_head_dim * hidden
    )
    expert = 3 * hidden * config.moe_intermediate_size
    dense_layers = config.num_hidden_layers - moe_layers
    per_expert = _expert_bytes(config, preset)
    slots = preset.neuron_config["batch_size"] * preset.neuron_config["seq_len"]
    return Footprint(
        attention=config.num_hidden_layers * split * BF16 // ranks,
        dense_mlp=dense_layers * 3 * hidden * config.intermediate_size * BF16 // ranks,
        shared_experts=moe_layers * config.n_shared_experts * expert * BF16 // ranks,
        routed_experts=moe_layers * config.n_routed_experts // preset.moe_ep * per_expert,
        router=moe_layers * config.n_routed_experts * (hidden * BF16 + FLOAT32),
        embedding_and_head=2 * config.vocab_size * hidden * BF16 // ranks,
        cache=config.num_hidden_layers * slots * config.cache_dim * BF16,
    )


def _expert_bytes(config: KimiK2Config, preset: NeuronPreset) -> int:
    """One expert's share on one core, scales included."""
    hidden, width = config.hidden_size, config.moe_intermediate_size // preset.moe_tp
    if preset.experts == "bf16":
        return 3 * hidden * width * BF16
    if preset.experts == "per_channel_fp8":
        return 3 * hidden * width + (2 * width + hidden) * FLOAT32
    block = math.gcd(128, width)
    return 3 * hidden * width + 3 * (hidden // block) * (width // block) * FLOAT32
