"""Which slice of which tensor goes to which rank, as data. Nothing else in the package decides it.

Targets:
    neuron: names and layouts of NeuronKimiK2ForCausalLM's state dict, cut as NxD's `shard_checkpoint` cuts it. Routed
        experts are [E, input, output]; gate and up lie side by side and are cut with stride 2.
    cuda: the checkpoint's own names and [output, input] layouts, routed experts stacked [E, output, input].
Attention, dense MLP, shared experts, embedding and head are split over all ranks; routed experts over `moe_ep` groups
of `moe_tp` ranks: rank r holds the experts of group r // moe_tp and slice r % moe_tp of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.sharding.attention_tiles import check_sizes, check_stored
from kimi_k2.sharding.experts.format import ExpertFormat, expert_formats
from kimi_k2.sharding.layout import GLOBAL_LAYER, Layout
from kimi_k2.sharding.plan_cuda import cuda_layer
from kimi_k2.sharding.plan_neuron import neuron_layer
from kimi_k2.sharding.planned import PlannedTensor, ShardingPlan


def make_plan(config: KimiK2Config, layout: Layout, experts: ExpertFormat | None = None) -> ShardingPlan:
    """The plan of a model.

    Args:
        config: of the model.
        layout: ranks and formats.
        experts: of the routed experts for neuron; None for the layout's own.

    Raises:
        ConfigError: a size does not divide among the ranks, or a rank's slice would cut a scale block.
    """
    _check_divisible(config, layout)
    if layout.target == "neuron":
        experts = experts or expert_formats()[layout.experts].for_layout(config, layout)
        if layout.attention_tiles(config):
            check_sizes(config)
            check_stored(config, layout.attention_tiles(config))
        if layout.query_group and layout.ranks > 1 and config.num_attention_heads != layout.ranks:
            expected = f"one head a rank ({layout.ranks}) with query_group"
            raise ConfigError(f"expected {expected}, got {config.num_attention_heads}", field="num_attention_heads")
    tensors: list[PlannedTensor] = list(_global_tensors(config, layout))
    for layer in range(config.num_hidden_layers):
        tensors += neuron_layer(config, layout, layer, experts) if experts else cuda_layer(config, layout, layer)
    plan = ShardingPlan(config, layout, tuple(tensors))
    for tensor in plan.tensors:
        if tensor.dim is not None and tensor.shape[tensor.dim] % (tensor.stride * tensor.parts):
            raise ConfigError(
                f"{tensor.name}: dimension {tensor.dim} of {list(tensor.shape)} cannot be cut into {tensor.parts}"
            )
    return plan


# Tensors of the NxDI class alone: its rank numbers, and weights that its decode step folds into others.
_NXDIS = re.compile(r"\.rank$|\.early_")


def without_nxdis(plan: ShardingPlan) -> ShardingPlan:
    """What of a plan for neuron the model of vllm-neuron's torch-native line holds."""
    return replace(plan, tensors=tuple(tensor for tensor in plan.tensors if not _NXDIS.search(tensor.name)))


def _check_divisible(config: KimiK2Config, layout: Layout) -> None:
    for field, parts in (
        ("num_attention_heads", layout.dense),
        ("vocab_size", layout.dense),
        ("hidden_size", layout.dense),
        ("intermediate_size", layout.dense),
        ("n_routed_experts", layout.moe_ep),
        ("moe_intermediate_size", layout.dense),
    ):
        if getattr(config, field) % parts:
            raise ConfigError(f"{getattr(config, field)} does not divide among {parts} ranks", field=field)


def _global_tensors(config: KimiK2Config, layout: Layout) -> Iterator[PlannedTensor]:
    ranks, shape = layout.dense, (config.vocab_size, config.hidden_size)
    dtype = layout.dtype
    if layout.target == "cuda":
        yield PlannedTensor("model.embed_tokens.weight", dtype, shape, GLOBAL_LAYER, 0, 1, ranks)
        yield PlannedTensor("model.norm.weight", dtype, shape[1:], GLOBAL_LAYER)
        yield PlannedTensor("lm_head.weight", dtype, shape, GLOBAL_LAYER, 0, 1, ranks)
        return
    yield PlannedTensor("rank_util.rank", torch.int32, (ranks,), GLOBAL_LAYER, 0, 1, ranks)
    yield PlannedTensor("embed_tokens.weight", dtype, shape, GLOBAL_LAYER, 1, 1, ranks)
    yield PlannedTensor("norm.weight", dtype, shape[1:], GLOBAL_LAYER)
    yield PlannedTensor("lm_head.weight", dtype, shape, GLOBAL_LAYER, 0, 1, ranks)
