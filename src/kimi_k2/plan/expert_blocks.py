"""How the routed experts of a pass are computed: which share of them is read, and in how many blocks of tokens."""

from __future__ import annotations

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.target import Target
from kimi_k2.plan.torch_native import blocks_of


def moe_layers(config: KimiK2Config) -> int:
    """Layers with routed experts."""
    return sum(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))


def local_experts(config: KimiK2Config, target: Target) -> int:
    """Routed experts of one expert-parallel group, of which each rank holds a part."""
    return config.n_routed_experts // target.layout.moe_ep


def expert_share(config: KimiK2Config, target: Target, tokens: int) -> float:
    """Share of a rank's experts that are read.

    On Neuron one static slot for every choice, until that is more than all; on a GPU the experts that somebody chose,
    on average if every expert is as likely as another.
    """
    local = local_experts(config, target)
    if not target.is_neuron:
        return 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** tokens
    if target.layout.moe_ep > 1 and not target.arrangement.selective_under_ep:
        return 1.0
    return min(tokens * config.num_experts_per_tok / local, 1.0)


def expert_blocks(config: KimiK2Config, target: Target, tokens: int) -> int:
    """Blocks of a blockwise prefill: full ones, and one that may be part empty for every local expert.

    0 where another path computes the experts: on a GPU, and for prompts too short to fill a block.
    """
    pairs = tokens * config.num_experts_per_tok
    if target.torch_native:
        return blocks_of(pairs, tokens, local_experts(config, target))
    if not target.is_neuron or not target.block_size or pairs < target.block_size:
        return 0
    if expert_share(config, target, tokens) < 1:
        return 0
    spare = local_experts(config, target) - 1
    return min(max(-(-(pairs - spare) // target.block_size), 0) + spare, pairs)


def blocks_at_once(config: KimiK2Config, target: Target) -> int:
    """Blocks of a group of the PyTorch prefill, groups of one size; 0 where prefill has no blocks."""
    if not target.block_size:
        return 0
    most = max(target.prefill_rows_at_once // target.block_size, 1)
    blocks = expert_blocks(config, target, target.prefill_sequences * target.prompt)
    return -(-blocks // -(-blocks // most)) if blocks and not target.torch_native else most
