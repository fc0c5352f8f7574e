"""A decoder layer's tensors for Neuron: NeuronKimiK2ForCausalLM's names, experts [E, input, output]."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.attention_tiles import SOURCES, attention_tiles_tensors, group_tensors, in_place_of_linears
from kimi_k2.sharding.early_qkv_a import early_qkv_a_tensors, precedes_another
from kimi_k2.sharding.early_router import early_router_tensors
from kimi_k2.sharding.experts.format import ExpertFormat
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.modules import linears, norms
from kimi_k2.sharding.planned import PlannedTensor


def neuron_layer(config: KimiK2Config, layout: Layout, layer: int, experts: ExpertFormat) -> Iterator[PlannedTensor]:
    """All tensors of decoder layer `layer`."""
    root, ranks, dtype = f"layers.{layer}", layout.ranks, layout.dtype
    for name, size in norms(config).items():
        yield PlannedTensor(f"{root}.{name}.weight", dtype, (size,), layer)
    shape = (config.qkv_a_dim, config.hidden_size)
    yield PlannedTensor(f"{root}.self_attn.qkv_a_proj.weight", dtype, shape, layer, 0, 1, ranks)
    tiled = SOURCES if in_place_of_linears(layout.attention_tiles(config)) else ()
    for name, rows, columns, dim in linears(config, layer):
        if name not in tiled and (experts.shared is None or "shared_experts" not in name):
            yield PlannedTensor(f"{root}.{name}.weight", dtype, (rows, columns), layer, dim, 1, ranks)
    if layout.attention_tiles(config):
        yield from attention_tiles_tensors(config, root, layer, ranks, layout.attention_tiles(config), dtype)
        if layout.query_group and config.is_moe_layer(layer):
            yield from group_tensors(config, root, layer, layout.query_group, layout.attention_tiles(config), dtype)
    if layout.kernels and precedes_another(config, layer):
        sizes = (ranks, layout.moe_tp, layout.moe_ep)
        yield from early_qkv_a_tensors(config, root, layer, sizes, experts, dtype)
    if not config.is_moe_layer(layer):
        return
    count, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    tp, ep = layout.moe_tp, layout.moe_ep
    gate = (hidden, count) if experts.tiles else (count, hidden)
    yield PlannedTensor(f"{root}.mlp.router.linear_router.weight", dtype, gate, layer)
    yield PlannedTensor(f"{root}.mlp.router.e_score_correction_bias", torch.float32, (count,), layer)
    if layout.kernels:
        yield from early_router_tensors(config, root, layer, ranks)
    mlps = f"{root}.mlp.expert_mlps"
    if layout.has_spmd_rank:
        yield PlannedTensor(f"{mlps}.spmd_rank.rank", torch.int32, (ranks,), layer, 0, 1, ranks)
        if ep > 1:
            yield PlannedTensor(
                f"{mlps}.spmd_rank.local_expert_indices", torch.int32, (ranks, count // ep), layer, 0, 1, ranks
            )
    yield from _stack(f"{mlps}.mlp_op", experts, (count, width, hidden), dtype, layer, tp, ep)
    if experts.shared is not None:
        sizes = (1, width * config.n_shared_experts, hidden)
        yield from _stack(f"{mlps}.shared_experts", experts.shared, sizes, dtype, layer, ranks, 1)


def _stack(
    root: str, experts: ExpertFormat, sizes: tuple[int, int, int], dtype: torch.dtype, layer: int, tp: int, ep: int
) -> Iterator[PlannedTensor]:
    """A stack of experts, a suffix after the other, as NxD's modules hold them; sizes: experts, their width, hidden."""
    count, width, hidden = sizes
    up, down = experts.specs(width, hidden, dtype), experts.specs(hidden, width, dtype)
    for suffix in up:
        held, (rows, columns) = up[suffix]
        fused, cut = experts.fused_shape(suffix, rows, columns)
        yield PlannedTensor(f"{root}.gate_up_proj.{suffix}", held, (count, *fused), layer, cut + 1, 2, tp, ep)
        held, (rows, columns) = down[suffix]
        dim = 1 if columns > 1 else None  # a scale of whole channels is every rank's
        yield PlannedTensor(f"{root}.down_proj.{suffix}", held, (count, columns, rows), layer, dim, 1, tp, ep)
