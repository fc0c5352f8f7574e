"""A decoder layer's tensors for Neuron: NeuronKimiK2ForCausalLM's names, experts [E, input, output]."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.fp8_block import block_grid
from kimi_k2.sharding.layout import Layout, expert_block
from kimi_k2.sharding.modules import linears, norms
from kimi_k2.sharding.planned import PlannedTensor


def neuron_layer(config: KimiK2Config, layout: Layout, layer: int) -> Iterator[PlannedTensor]:
    """All tensors of decoder layer `layer`."""
    root, ranks, dtype = f"layers.{layer}", layout.ranks, layout.dtype
    for name, size in norms(config).items():
        yield PlannedTensor(f"{root}.{name}.weight", dtype, (size,), layer)
    shape = (config.q_lora_rank + config.cache_dim, config.hidden_size)
    yield PlannedTensor(f"{root}.self_attn.qkv_a_proj.weight", dtype, shape, layer, 0, 1, ranks)
    for name, rows, columns, dim in linears(config, layer):
        yield PlannedTensor(f"{root}.{name}.weight", dtype, (rows, columns), layer, dim, 1, ranks)
    if not config.is_moe_layer(layer):
        return
    experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    tp, ep = layout.moe_tp, layout.moe_ep
    yield PlannedTensor(f"{root}.mlp.router.linear_router.weight", dtype, (experts, hidden), layer)
    yield PlannedTensor(f"{root}.mlp.router.e_score_correction_bias", torch.float32, (experts,), layer)
    mlps = f"{root}.mlp.expert_mlps"
    if layout.has_spmd_rank:
        yield PlannedTensor(f"{mlps}.spmd_rank.rank", torch.int32, (ranks,), layer, 0, 1, ranks)
        if ep > 1:
            yield PlannedTensor(
                f"{mlps}.spmd_rank.local_expert_indices", torch.int32, (ranks, experts // ep), layer, 0, 1, ranks
            )
    code = layout.dtype if layout.experts == "bf16" else torch.float8_e4m3fn
    up, down = f"{mlps}.mlp_op.gate_up_proj", f"{mlps}.mlp_op.down_proj"
    yield PlannedTensor(f"{up}.weight", code, (experts, hidden, 2 * width), layer, 2, 2, tp, ep)
    yield PlannedTensor(f"{down}.weight", code, (experts, width, hidden), layer, 1, 1, tp, ep)
    if layout.experts == "per_channel":
        yield PlannedTensor(f"{up}.scale", torch.float32, (experts, 1, 2 * width), layer, 2, 2, tp, ep)
        yield PlannedTensor(f"{down}.scale", torch.float32, (experts, 1, hidden), layer, None, 1, tp, ep)
    elif layout.experts == "blockwise":
        block = expert_block(config, layout)
        rows, columns = block_grid((width, hidden), (block, block))
        yield PlannedTensor(f"{up}.scale", torch.float32, (experts, columns, 2 * rows), layer, 2, 2, tp, ep)
        yield PlannedTensor(f"{down}.scale", torch.float32, (experts, rows, columns), layer, 1, 1, tp, ep)
