"""Matrix-multiply instructions of a prefill graph on Neuron, and what neuronx-cc's limit makes of them. Modelled.

The Tensor Engine takes 128 x 128 stationary values and up to 512 columns that move past them an instruction
(trainium_inferentia2_arch.rst of aws-neuron-sdk). Other engines' instructions, loads and stores are not counted, so
this is a lower bound. The compiler refuses a graph of too many instructions (NCC_EVRF007, NCC_EBVF030, NCC_EXTP004).
The documentation names no figure; the compiler's message does (aws-neuron-sdk's issue 987: "over the threshold
(5000000)"), and so does NxDI's models/qwen3_moe, which raises it to 15 million, as we do for long prompts. Whether it
holds for a whole graph or for each part of the modular flow, into which NxDI has prefill cut
(`--modular-flow-mac-threshold=10`), is not documented.
"""

from __future__ import annotations

from math import prod
from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.cost import of_stage
from kimi_k2.plan.memory import category, expert_blocks
from kimi_k2.plan.target import Target
from kimi_k2.sharding.layout import ShardingPlan

STATIONARY, MOVING = 128, 512
LIMIT, RAISED_LIMIT = 5_000_000, 15_000_000
RAISED = f"--internal-max-instruction-limit={RAISED_LIMIT}"
LONG_PROMPT = 2048  # prefill of more tokens is compiled with RAISED


def prefill_instructions(config: KimiK2Config, target: Target, plan: ShardingPlan) -> dict[str, Any] | None:
    """By part, in all, the limit, and what follows; None on a GPU."""
    if not target.is_neuron:
        return None
    tokens = target.prefill_sequences * target.prompt
    parts = {"linears": 0, "routed experts": 0, "attention": 0}
    for tensor in of_stage(plan, target, decode=False).tensors:
        name, shape = tensor.name, tensor.local_shape
        if len(shape) < 2 or "scale" in name or "embed_tokens" in name or category(name) == "expert weights":
            continue
        rows = target.prefill_sequences if "lm_head" in name else tokens
        inner, outer = shape if len(shape) == 2 else (prod(shape) // STATIONARY, STATIONARY)  # tiles
        parts["linears"] += _matmuls(inner, outer, rows)
    layers = sum(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))
    hidden, width = config.hidden_size, config.moe_intermediate_size // target.layout.moe_tp
    blocks, rows = expert_blocks(config, target, tokens), target.block_size or 1
    if not blocks:
        blocks, rows = config.n_routed_experts // target.layout.moe_ep, tokens
    one = _matmuls(hidden, 2 * width, rows) + _matmuls(width, hidden, rows)
    parts["routed experts"] = layers * blocks * one
    heads, keys = config.num_attention_heads // target.layout.ranks, target.prompt
    scores = _matmuls(config.cache_dim, keys, target.prompt) + _matmuls(keys, config.kv_lora_rank, target.prompt)
    parts["attention"] = config.num_hidden_layers * heads * target.prefill_sequences * scores
    total = sum(parts.values())
    limit = RAISED_LIMIT if target.prompt > LONG_PROMPT else LIMIT
    return {"matmuls": parts, "total": total, "limit": limit, "follows": _follows(total, limit)}


def _matmuls(inner: int, outer: int, columns: int) -> int:
    return -(-inner // STATIONARY) * -(-outer // STATIONARY) * -(-columns // MOVING)


def _follows(total: int, limit: int) -> str:
    if total >= limit:
        return "more than the compiler takes: shorten max_context_length"
    if limit > LIMIT:
        return f"compile raises the limit for prompts of more than {LONG_PROMPT:,} tokens ({RAISED})"
    if 2 * total >= limit:
        return f"more than half of it by matmuls alone: should the compiler refuse the graph (NCC_EVRF007), {RAISED}"
    return "far from it"
