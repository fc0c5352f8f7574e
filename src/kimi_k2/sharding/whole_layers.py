"""What the kernels of whole layers (`kimi_k2.nki.kernels.layers`) take: of a step, of its cache, of a model."""

from __future__ import annotations

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError

# Of a step, whose tiles fit SBUF at the widths of a rank of 64 and 4,096 slots, by the emulator.
MOST_TOKENS = 32
MOST_HEADS = 128  # of all sequences, where a group of ranks shares a cache: a partition each


def slots_at_once(cores: int, group: int = 1) -> int:
    """Slots of a cache that `group` ranks of so many cores share, of which its length is a multiple."""
    return 128 * cores * group


def token_buckets(longest: int, least: int) -> list[int]:
    """A cache's length and its halves, ascending, that are multiples of `least`: NxDI's begin with 128."""
    buckets = [longest]
    while (half := buckets[0] // 2) and half % least == 0:
        buckets.insert(0, half)
    return buckets


def check_model(config: KimiK2Config, ranks: int, cores: int, query_group: int = 0, *, halves: bool = False) -> None:
    """Refuse models that the kernels do not take.

    Args:
        config: of the model.
        ranks: that share it.
        cores: of a rank, 1 or 2 (LNC).
        query_group: ranks that share a cache; 0 for none.
        halves: whether an entry lies in two halves.

    Raises:
        ConfigError: naming the field, and what they take.
    """
    layers, side, chunk = range(config.num_hidden_layers), 128 * cores, 256 if halves else 128
    dense = [layer for layer in layers if not config.is_moe_layer(layer)]
    experts, hidden, heads = config.n_routed_experts, config.hidden_size, config.num_attention_heads
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    behind = bool(dense) and dense == list(range(len(dense)))
    for taken, field, expected in (
        (behind, "first_k_dense_replace", "MoE layers behind dense ones"),
        (experts % 128 == 0 and experts <= 512, "n_routed_experts", "a multiple of 128 up to 512"),  # columns of logits
        (config.num_experts_per_tok == 8, "num_experts_per_tok", "8"),
        (hidden <= 128 * ranks, "hidden_size", "at most 128 columns of the residual a rank"),
        (hidden % side == 0, "hidden_size", f"a multiple of {side}"),
        (not query_group or heads == ranks, "num_attention_heads", "one head a rank with flash decoding"),
        (
            rank % chunk == 0 and rank <= 512 and rope <= 128,
            "kv_lora_rank",
            f"a multiple of {chunk} up to 512, rotary 128",
        ),
        (config.norm_topk_prob, "norm_topk_prob", "normalised weights alone"),
    ):
        if not taken:
            raise ConfigError(f"decode 'layers' takes {expected}, got {getattr(config, field)}", field=field)
