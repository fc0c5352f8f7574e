"""Lengths, batches and sizes that this model or NxDI's host code takes; a planner asks without NxD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .quantization import require

# Of config.json, numbers.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "first_k_dense_replace", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "max_position_embeddings",
)  # fmt: skip


def check_batches(neuron: Any) -> None:
    """Refuse what NxDI would do wrong with the lines of a batch; a cache in blocks has none."""
    if neuron.is_block_kv_layout:
        return
    single, batched = neuron.is_continuous_batching, neuron.batch_size
    contexts = 1 if single else batched
    stated = neuron.ctx_batch_size in (None, contexts)
    require(stated, "ctx_batch_size", f"expected {contexts}, got {neuron.ctx_batch_size}")
    require(
        not single or batched == 1 or neuron.apply_seq_ids_mask, "apply_seq_ids_mask",
        "expected True: a step of some sequences would overwrite the others' caches",
    )  # fmt: skip
    require(
        not neuron.output_logits or single or batched == 1, "output_logits",
        "needs is_continuous_batching: NxDI's ModelWrapper cannot take a part of a batch otherwise",
    )  # fmt: skip


def ascending(buckets: Sequence[int], last: int) -> bool:
    """Whether buckets ascend to this one."""
    return [*buckets] == sorted({*buckets}) and last == max(buckets, default=0)


def check_buckets(neuron: Any) -> None:
    """Refuse buckets that do not hold what is longest: NxDI takes the first that holds a prompt or a cache."""
    longest = {"context_encoding_buckets": "max_context_length", "token_generation_buckets": "seq_len"}
    for name, last in longest.items():
        stated, most = getattr(neuron, name), getattr(neuron, last)
        require(stated is None or neuron.enable_bucketing, name, "needs enable_bucketing")
        holds = stated is None or ascending(stated, most)
        require(holds, name, f"expected ascending lengths, the last of which is {last} ({most}), got {stated}")


def check_lengths(neuron: Any, names: Sequence[str], divisor: int, of: str = "ranks") -> None:
    """Refuse lengths, and buckets (NxDI makes them from 128 on), that do not divide by `divisor`."""
    default = [128] if neuron.enable_bucketing else []
    for name in names:
        stated = getattr(neuron, name) or default
        for length in [stated] if isinstance(stated, int) else stated:
            require(length % divisor == 0, name, f"{length} tokens do not divide into {divisor} ({of})")


def check_sizes(config: Any, neuron: Any) -> None:
    """Refuse sizes that make no model or do not divide among the ranks."""
    for name in SIZES:
        value, least = getattr(config, name), 0 if name in ("n_shared_experts", "first_k_dense_replace") else 1
        require(type(value) is int and value >= least, name, f"expected a number from {least}, got {value!r}")
    heads = config.num_attention_heads
    require(config.num_key_value_heads == heads, "num_key_value_heads", f"expected {heads}: one latent for all heads")
    require(config.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "expected an even number")
    require(config.num_experts_per_tok <= config.n_routed_experts, "num_experts_per_tok", "more than n_routed_experts")
    require(neuron.seq_len <= config.max_position_embeddings, "seq_len", "more than max_position_embeddings")
    divided = dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads"), neuron.tp_degree)
    if config.first_k_dense_replace:
        divided["intermediate_size"] = neuron.tp_degree
    divided |= {"moe_intermediate_size": neuron.moe_tp_degree, "n_routed_experts": neuron.moe_ep_degree}
    sampling = neuron.on_device_sampling_config
    if sampling is not None and sampling.do_sample:
        most = config.vocab_size // neuron.tp_degree  # a rank's part, of which NxDI's sampler takes the best
        fits = sampling.global_topk <= most
        require(fits, "on_device_sampling_config.global_topk", f"expected at most {most}, got {sampling.global_topk}")
    sizes = [(name, getattr(config, name), ranks) for name, ranks in divided.items()]
    down = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim  # columns of both down projections
    sizes.append(("q_lora_rank", down, neuron.tp_degree))
    sizes.append(("n_shared_experts", config.moe_intermediate_size * config.n_shared_experts, neuron.tp_degree))
    for name, size, ranks in sizes:
        require(size % ranks == 0, name, f"{size} does not divide among {ranks} ranks")
