"""Linears and norms of a decoder layer outside the routed experts, with the dimension that ranks divide."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k2.config import KimiK2Config


def linears(config: KimiK2Config, layer: int) -> Iterator[tuple[str, int, int, int | None]]:
    """Name, output and input size, and the dimension of [output, input] that is cut."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    yield "self_attn.q_b_proj", heads * config.qk_head_dim, config.q_lora_rank, 0
    yield "self_attn.kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank, 0
    yield "self_attn.o_proj", hidden, heads * config.v_head_dim, 1
    mlp, width = "mlp", config.intermediate_size
    if config.is_moe_layer(layer):
        if not config.n_shared_experts:
            return
        mlp, width = "mlp.shared_experts", config.moe_intermediate_size * config.n_shared_experts
    yield f"{mlp}.gate_proj", width, hidden, 0
    yield f"{mlp}.up_proj", width, hidden, 0
    yield f"{mlp}.down_proj", hidden, width, 1


def norms(config: KimiK2Config) -> dict[str, int]:
    """Size of each RMSNorm by name."""
    return {
        "input_layernorm": config.hidden_size,
        "self_attn.q_a_layernorm": config.q_lora_rank,
        "self_attn.kv_a_layernorm": config.kv_lora_rank,
        "post_attention_layernorm": config.hidden_size,
    }
